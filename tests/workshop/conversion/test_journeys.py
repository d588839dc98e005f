"""The commands of tools/README.md, as they stand there, in a folder that has what they name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from models import ROOT, config_of, convert, done, made, tensors_of
from test_of_runs import leave_step

from megatron_rl.config import from_mapping, to_yaml

JOURNEY = re.compile(r"```bash journey\n(.*?)```", re.DOTALL)
README = (ROOT / "tools" / "README.md").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("journeys")
    config = config_of("qwen3", tie_word_embeddings=True)
    made(folder / "models" / "policy", config)
    done("quantize", folder / "models" / "policy", folder / "models" / "released-fp8", "--format", "fp8_block")
    run = folder / "runs" / "dapo"
    run.mkdir(parents=True)
    about = {"model": {"path": str(folder / "models" / "policy")}, "quantization": {"format": "int8"}}
    (run / "config.yaml").write_text(to_yaml(from_mapping(about)))
    for step in (100, 120):
        made(folder / "steps" / str(step), config, seed=step)
        done("import", folder / "steps" / str(step), folder / "imported" / str(step))
        leave_step(run, folder / "imported" / str(step), step, {"none": torch.zeros(1)})
    return folder


def test_there_are_four() -> None:
    assert len(JOURNEY.findall(README)) == 4


@pytest.mark.parametrize("journey", JOURNEY.findall(README), ids=range(1, 5))
def test_a_journey(place: Path, monkeypatch: pytest.MonkeyPatch, journey: str) -> None:
    monkeypatch.chdir(place)
    for line in journey.splitlines():
        program, tool, *words = shlex.split(line)
        assert (program, tool) == ("python", "tools/convert.py")
        assert convert.main(words) == 0, line


def test_where_they_lead(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    sampled, int8 = (tensors_of(place / "served" / name) for name in ("dapo-sampled", "dapo-int8"))
    assert all(torch.equal(tensor, int8[name]) for name, tensor in sampled.items())


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for name in convert.COMMANDS:
        with pytest.raises(SystemExit):
            convert.main([name, "--help"])
        assert f"example: python tools/convert.py {name}" in capsys.readouterr().out
