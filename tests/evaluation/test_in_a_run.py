"""Two sets in one run, what the run leaves, and the commands that ask its models: one engine
each.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import prepare_data
import pyarrow.parquet as pq
import pytest
from helpers import write_lines
from preloaded import run

from megatron_rl.apps.reports.run_data import load_run
from megatron_rl.apps.reports.sections import sections
from megatron_rl.data.toy import write_toy
from megatron_rl.models.hf_folder import HfFolder
from megatron_rl.tracking.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
RECIPE = """
base: {root}/recipes/toy_sft.yaml
run: {{steps: 2, stop: null, name: run}}
data: {{train: toy/train.jsonl, eval: toy/test.jsonl}}
model: {{path: toy/model}}
rollout: {{prompts_per_step: 16}}
quantization: none
learner: {{tensor_parallel: 1}}
sampler: {{vllm: {{max_num_seqs: 64}}}}
sync: {{every: 1, probe_every: 0}}
reward: {{name: "mine:by_first"}}
eval:
  every: 1
  max_prompts: 24
  sets:
    again: {{samples: 4}}
    exact: {{reward: exact_match, max_prompts: 8}}
checkpoint: {{every: 1, keep_last: 1, best: eval/again/accuracy, export_hf: true}}
log: {{record_every: 0, alarms: {{}}}}
"""
# a policy that knows nothing is right for some prompts and answers, and wrong for others
REWARD = """
def by_first(row, answer_key, response):
    return {"score": float(response[:1] in "012345"), "pred": response[:1]}
"""


def asked(place: Path, *words: str, kind: str = "torch") -> subprocess.CompletedProcess[str]:
    done = run(
        kind,
        [sys.executable, "-m", "megatron_rl.cli", *words],
        cwd=place,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluation")
    write_toy(folder / "toy")
    (folder / "mine.yaml").write_text(RECIPE.format(root=ROOT))
    (folder / "mine.py").write_text(REWARD)
    asked(folder, "train", "mine.yaml")
    return folder


@pytest.mark.engine
def test_each_set_has_its_numbers_at_start_every_step_and_at_the_end(place: Path) -> None:
    lines = read_metrics(place / "runs/run/metrics.jsonl")
    assert [line["progress/step"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["eval/n"] == line["eval/again/n"] == 24
        assert line["eval/exact/n"] == 8
        assert (
            0
            < line["eval/again/accuracy"]
            <= line["eval/again/pass@2"]
            <= line["eval/again/pass@4"]
            <= 1
        )
        assert 0 <= line["eval/again/maj@4"] <= 1
        assert line["eval/again/accuracy_stderr"] > 0
        assert line["eval/exact/accuracy"] < line["eval/again/accuracy"]
    assert json.loads((place / "runs/run/status.json").read_text())["unknown_metrics"] == []
    (figure,) = [
        one.figure
        for one in sections([load_run(place / "runs/run")])["Learning"]
        if one.title.startswith("Held")
    ]
    assert {"accuracy", "again", "exact"} <= {trace.name for trace in figure.data}
    assert sum(trace.fill == "toself" for trace in figure.data) == 3


@pytest.mark.engine
def test_the_last_model_and_the_best_one_are_left(place: Path) -> None:
    home = place / "runs/run"
    lines = read_metrics(home / "metrics.jsonl")[1:]
    best = max(lines, key=lambda line: (line["eval/again/accuracy"], -line["progress/step"]))[
        "progress/step"
    ]
    name = "model.layers.0.mlp.down_proj.weight"
    last, kept = (HfFolder(home / folder).get(name) for folder in ("model", "model-best"))
    assert (last == kept).all().item() == (best == 2)
    for folder in ("model", "model-best"):
        assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= set(
            os.listdir(home / folder)
        )
    assert "model-best/" in (home / "logs/attempt_1/driver.log").read_text()


@pytest.mark.engine
def test_the_command_repeats_the_run_s_numbers_and_writes_what_the_sanity_set_reads(
    place: Path,
) -> None:
    rows = [json.loads(line) for line in (place / "toy/test.jsonl").read_text().splitlines()]
    write_lines(place / "raw.jsonl", rows[:64])
    assert (
        prepare_data.main(
            ["aime_2024", str(place / "raw.jsonl"), "-o", str(place / "prepared.parquet")]
        )
        == 0
    )
    words = [
        "eval.max_prompts=64",
        "--set",
        "again",
        "--set",
        "prepared.parquet",
        "--format",
        "bf16",
        "-o",
        "rates",
    ]
    done = asked(
        place, "eval", "runs/run", *words, "eval.sets.again.max_prompts=24", "eval.samples=4"
    )
    assert "avg@k" in done.stdout
    assert "64 of 64 prompts" in done.stderr
    found = json.loads((place / "rates/summary.json").read_text())
    last = read_metrics(place / "runs/run/metrics.jsonl")[-1]
    # the engine of the run had the same weights, the same seeds and the same format
    assert found["metrics"]["eval/again/accuracy"] == pytest.approx(
        last["eval/again/accuracy"], abs=0.05
    )

    rates = [json.loads(line) for line in (place / "rates/prepared.jsonl").read_text().splitlines()]
    assert all(each["n"] == 4 == sum(each["verdicts"].values()) for each in rates)
    between = {each["prompt"] for each in rates if 0.2 <= each["pass_rate"] <= 0.8}
    assert 0 < len(between) < 64
    more = ["--pass-rates", str(place / "rates/prepared.jsonl"), "--keep-between", "0.2", "0.8"]
    assert (
        prepare_data.main(
            ["aime_2024", str(place / "raw.jsonl"), *more, "-o", str(place / "sanity.parquet")]
        )
        == 0
    )
    assert set(pq.read_table(place / "sanity.parquet").column("prompt").to_pylist()) == between


@pytest.mark.engine
def test_a_checkpoint_answers_in_another_format(place: Path) -> None:
    (step,) = (place / "runs/run/checkpoints").glob("step_2")
    done = asked(place, "chat", str(step), "--format", "int8", "-p", "12+34=")
    assert done.stdout.strip()
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.engine
@pytest.mark.fault("the reader of chat's answer is gone", "its engine ends, without a traceback")
def test_chat_on_a_pipe(place: Path) -> None:
    chat = f"printf '12+34=\\n' | {sys.executable} -m megatron_rl.cli chat runs/run"
    shell = {"cwd": place, "capture_output": True, "text": True, "timeout": 300, "check": True}
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {chat} | cat"], **shell)
    assert len(done.stdout.splitlines()) == 1
    gone = subprocess.run(["bash", "-c", f"{chat} | true; echo ${{PIPESTATUS[1]}}"], **shell)
    assert gone.stdout == "0\n"
    assert "Traceback" not in gone.stderr + done.stderr


@pytest.mark.engine
def test_where_learner_and_sampler_of_a_run_differ(place: Path) -> None:
    """FP8, which is the engine's alone."""
    words = ["mismatch", "runs/run", "--format", "fp8", "-n", "2", "--tokens", "16"]
    lines = asked(place, *words, kind="megatron").stdout.splitlines()
    own = {line.split()[0]: float(line.split()[3]) for line in lines if line.startswith("layers.")}
    assert own["layers.0.qkv"] > 1e-4 > own["layers.0.input_norm"]
