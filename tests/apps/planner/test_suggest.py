"""`megatron-rl plan --suggest`: for models of every size; each suggestion passes a dry run."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.plan import plan
from megatron_rl.apps.planner.suggest import suggestions
from megatron_rl.config import cluster, load
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import named

RECIPE = str(Path(__file__).parents[3] / "recipes" / "dapo_int8.yaml")
# of ten models on 1, 8 and 32 GPUs each, those that say the most
CASES = (
    ("Qwen3-0.6B", "1x1xH100"),
    ("Qwen3-8B", "1x1xH100"),
    ("Qwen3-8B", "1x8xH100"),
    ("Qwen2.5-7B", "1x8xH100"),
    ("Llama-3.1-70B-Instruct", "1x8xH100"),
    ("Qwen3-30B-A3B", "4x8xH100"),
    ("Llama-3.1-70B-Instruct", "4x8xH100"),
)
TOO_LARGE = {("Qwen3-8B", "1x1xH100"), ("Llama-3.1-70B-Instruct", "1x8xH100")}


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty working folder, and a key for servers on other nodes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGATRON_RL_FLEET_KEY", "k" * 32)


@pytest.mark.parametrize(("model", "machine"), CASES)
def test_suggestions_pass_a_dry_run(
    model: str, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [RECIPE, f"model.path=models/{model}", "--on", machine]
    status = cli.main(["plan", *words, "--suggest"])
    said = capsys.readouterr()
    commands = [
        shlex.split(line)[4:] for line in said.out.splitlines() if " megatron-rl train " in line
    ]
    if (model, machine) in TOO_LARGE:
        assert (status, commands) == (2, [])
        assert "does not fit" in said.err
        return
    assert status == 0
    assert 1 <= len(commands) <= 5
    for overrides in commands[:2]:
        assert cli.main(["train", *words, *overrides, "--dry-run"]) == 0, capsys.readouterr().err
    assert cli.main(["plan", *words, *commands[0]]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "recipe", ["dapo_int8", "dapo_fp8", "grpo-llama3.1_8b-1n8g-int8", "dapo-qwen3_32b-1n8g-int8"]
)
def test_no_layout_makes_a_recipe_s_step_a_tenth_faster(recipe: str) -> None:
    path = Path(RECIPE).with_name(f"{recipe}.yaml")
    config = load(path)
    case = Case(config, read_card(config.model.path), named(str(cluster(path)[1])))
    best = suggestions(case)[0].plan.time
    own = plan(case).time
    assert best is not None and own is not None
    assert best.step > 0.9 * own.step
