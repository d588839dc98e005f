"""A reward of the user's is found beside the recipe and where the command runs; its mistakes are found at once."""

from pathlib import Path

import pytest

from megatron_rl import cli
from megatron_rl.config.schema import RewardSection
from megatron_rl.rewards.functions import RECIPE_FOLDER
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.task import Task

GOOD = "def right(row, answer_key, response):\n    return 0.5\n"


def dry_run(recipe: str, name: str) -> int:
    return cli.main(["train", recipe, "--dry-run", f"reward.name={name}"])


@pytest.mark.fault("a reward lies beside the recipe, the command runs elsewhere", "command and workers find it")
def test_beside_the_recipe(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv(RECIPE_FOLDER, "")
    (place / "sub" / "pack").mkdir(parents=True)
    (place / "sub" / "mine.yaml").write_text("base: ../mine.yaml\n")
    (place / "sub" / "beside_recipe.py").write_text(GOOD)
    (place / "sub" / "pack" / "inner.py").write_text(GOOD)
    (place / "where_it_runs.py").write_text(GOOD)
    for name in ("beside_recipe:right", "pack.inner:right", "where_it_runs:right"):
        assert dry_run("sub/mine.yaml", name) == 0, capsys.readouterr().err
        pool = RewardPool(RewardSection(name=name))
        pool.start()
        assert [score.reward for score in pool.score([Task({"answer": "1"}, "1")])] == [0.5]
        pool.close()
    assert dry_run("mine.yaml", "beside_recipe:right") == 2
    assert "No module named 'beside_recipe'" in capsys.readouterr().err


MISTAKES = {
    "a syntax error": ("def right(row:\n", "SyntaxError: "),
    "an exception": ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
    "sys.exit": ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    "sys.exit without a word": ("raise SystemExit\n", "SystemExit"),
    "the end of the process": ("import os; os._exit(0)\n", "the reward worker died at its start"),
    "a crash": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)\n", "the reward worker died at its start"),
    "no such function": ("def left(row, answer_key, response): ...\n", "has no attribute 'right'"),
    "two parameters": ("def right(row, response): ...\n", "is called as (row, answer_key, response)"),
    "four parameters": ("def right(row, a, b, c): ...\n", "is called as (row, answer_key, response)"),
    "named parameters": ("def right(*, row, answer_key, response): ...\n", "is called as (row, answer_key, response)"),
    "no function": ("right = 5\n", "is int, not a function"),
    "a coroutine": ("async def right(row, a, r): ...\n", "gives no number when it is called"),
    "a generator": ("def right(row, a, r): yield 1\n", "gives no number when it is called"),
    "an import that is missing": ("import no_such_thing\n", "No module named 'no_such_thing'"),
}  # fmt: skip


@pytest.mark.fault("a reward's module has a mistake, ends its process or crashes it", "the dry run says so")
@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, said = MISTAKES[kind]
    (place / "wrong.py").write_text("print('noise')\n" + text)
    assert dry_run("mine.yaml", "wrong:right") == 2
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line != "noise"]
    assert "noise" not in out
    assert len(errors) == 1, err
    assert errors[0].startswith("error: reward.name: ")
    assert said in errors[0]


def test_a_name_that_is_near(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run("mine.yaml", "exact_macth") == 2
    assert "did you mean exact_match?" in capsys.readouterr().err
