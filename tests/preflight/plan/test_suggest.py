"""`megatron-rl plan --suggest`: in seconds, for models of every size, and each suggestion passes a dry run."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from megatron_rl import cli

RECIPE = str(Path(__file__).parents[3] / "recipes" / "dapo_int8.yaml")
MACHINES = ("1x1xH100", "1x8xH100", "4x8xH100")
MODELS = (
    "Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B",
    "Qwen2.5-7B", "Qwen2.5-32B", "Llama-3.1-8B", "Llama-3.1-70B",
)  # fmt: skip


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the recipe is here; servers on other nodes have a key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_RL_FLEET_KEY", "k" * 32)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_suggestions_pass_a_dry_run(model: str, machine: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [RECIPE, f"model.path=models/{model}", "--on", machine]
    start = time.process_time()
    status = cli.main(["plan", *words, "--suggest"])
    assert time.process_time() - start < 10
    said = capsys.readouterr()
    commands = [shlex.split(line)[4:] for line in said.out.splitlines() if " megatron-rl train " in line]
    if status:
        assert not commands
        assert "does not fit" in said.err
        assert machine != "4x8xH100" or model == "Qwen3-235B-A22B"
        return
    assert commands
    for overrides in commands:
        assert cli.main(["train", *words, *overrides, "--dry-run"]) == 0, capsys.readouterr().err
        assert cli.main(["plan", *words, *overrides]) == 0, capsys.readouterr().err
