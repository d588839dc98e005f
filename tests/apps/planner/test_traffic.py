"""`megatron-rl plan`: recipes and planned sizes alike, in consistent numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers import Command, program

ROOT = Path(__file__).parents[3]
TRILLION = (
    "plan tools/bench/moe_1t.json quantization=fp8 sampler.tensor_parallel=8 "
    "learner.tensor_parallel=8 learner.pipeline_parallel=16 learner.data_parallel=8 "
    "learner.expert_parallel=64 learner.megatron.expert_tensor_parallel_size=1 "
    "learner.megatron.num_layers_in_first_pipeline_stage=3 "
    "learner.megatron.num_layers_in_last_pipeline_stage=2 --replicas 64 --link-gbs 50"
)


def cells(report: str, start: str) -> list[str]:
    """The row of a table that begins like this."""
    line = next(line for line in report.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_a_recipe(place: Path, command: Command) -> None:
    report = command("plan", "mine.yaml", "--replicas", "3")
    assert "2 ranks (TP2)" in report
    assert "x 3 engines" in report
    assert "x 2 engines" in command("plan", "mine.yaml", "sampler.engines=2")
    total = cells(report, "together")
    assert total[0:2] == ["together", "38"]
    link = cells(report, "files -> sampler")
    assert link[1] == "3"
    assert link[3] == cells(report, "learner -> files")[2] == total[2]
    # one rank per engine holds everything
    assert cells(report, "into a sampler rank")[1] == total[2]
    assert " s" not in link[-1]
    assert cells(command("plan", "mine.yaml", "--link-gbs", "2"), "files -> sampler")[-1].endswith(
        " s"
    )


def test_a_folder_stands_for_its_config(place: Path, command: Command) -> None:
    from_folder = command(
        "plan", "data/toy/model", "quantization=int8", "learner.tensor_parallel=2"
    )
    assert cells(from_folder, "together") == cells(command("plan", "mine.yaml"), "together")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["mime.yaml"], ["mime.yaml", "did you mean mine.yaml"]),
        (["nowhere.json"], ["nowhere.json", "config.json"]),
        (["data/toy/train.jsonl"], ["train.jsonl"]),
        (["mine.yaml", "model.path=nowhere"], ["model.path", "config.json"]),
        (
            ["mine.yaml", "learner.tensor_parallel=3", "--replicas", "0"],
            ["learner.tensor_parallel=3", "--replicas 0"],
        ),
        (["mine.yaml", "--link-gbs", "0"], ["--link-gbs 0"]),
    ],
)
def test_what_does_not_fit_is_named(
    place: Path, command: Command, words: list[str], expected: list[str]
) -> None:
    errors = command("plan", *words, status=2)
    assert "Traceback" not in errors
    assert all(word in errors for word in expected), errors


def test_nothing_is_written_and_no_torch_is_loaded(place: Path) -> None:
    before = sorted(place.rglob("*"))
    program(
        "import sys; from megatron_rl import cli\n"
        "cli.main(['plan', 'mine.yaml']); sys.exit('torch' in sys.modules)"
    )
    assert sorted(place.rglob("*")) == before


def test_a_trillion_parameters_on_1536_ranks(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.chdir(ROOT)
    report = command("plan", *TRILLION.split()[1:])
    assert "(TP8 PP16 EP64 DP8)" in report
    assert "(TP8 x 64 engines)" in report
    hf = json.loads((ROOT / "tools/bench/moe_1t.json").read_text())
    expert = 3 * hf["hidden_size"] * hf["moe_intermediate_size"]
    experts = hf["num_hidden_layers"] * hf["num_experts"] * expert
    parameters = float(report.split(" M parameters")[0].rsplit(" ", 1)[1].replace(",", "")) * 1e6
    assert experts < parameters < 1.02 * experts
    assert cells(report, "learner -> files")[1] == "1,024"
    assert cells(report, "files -> sampler")[1] == "512"
    assert "carries 1.0x" in report
    assert cells(report, "learner: gather")[1] == f"{16 * 7}"


def test_the_readme_s_command(place: Path, command: Command) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = [
        line.partition("#")[0] for line in lines if line.startswith("megatron-rl plan recipes")
    ]
    recipe, *options = line.split()[2:]
    assert "4 engines" in command("plan", str(ROOT / recipe), "model.path=data/toy/model", *options)
