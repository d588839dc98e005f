"""Functions of the user's: found where they lie, called as we, verl and TRL call them, their
mistakes found at once.
"""

from pathlib import Path

import pytest
from helpers import Command

from megatron_rl import cli
from megatron_rl.config.schema import RewardSection
from megatron_rl.rewards.functions import RECIPE_FOLDER, Rewards, read
from megatron_rl.rewards.pool import RewardPool
from megatron_rl.rewards.task import Judgement, Task
from megatron_rl.types import Verdict

MODULE = """
import numpy

def ours(row, answer_key, response, finish_reason):
    return 0.25 if finish_reason == "length" else float(row[answer_key] == response)

def short(row, answer_key, response, response_tokens):
    return float(row[answer_key] == response) - 0.001 * response_tokens

def verl(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": -1.0 if solution_str != ground_truth else 1.0, "acc": solution_str == ground_truth,
            "pred": solution_str, "length": len(solution_str), "seen": data_source == "gsm8k",
            "index": extra_info["index"], "stopped": extra_info["finish_reason"] == "stop", "odd": float("nan"),
            "large": 10**400, "both": numpy.ones(2)}

def verl_without_extras(data_source, solution_str, ground_truth):
    return 1.0

def trl(prompts, completions, solution, level, **kwargs):
    assert prompts == [[{"role": "user", "content": "1+1="}]] and kwargs["data_source"] == ["gsm8k"], (prompts, kwargs)
    return [float(said[0]["content"] == truth) for said, truth in zip(completions, solution)]

def trl_plain(completions, **kwargs):
    return [None if said == "?" else len(said) / 10 for said in completions]

def no_score(row, key, response):
    return {"accuracy": 1.0}
"""
ROW = {
    "prompt": [{"role": "user", "content": "1+1="}],
    "solution": "2",
    "level": 3,
    "data_source": "gsm8k",
    "extra_info": {"index": 7},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(MODULE)
    (tmp_path / "sub" / "recipe.yaml").write_text("")
    monkeypatch.setenv(RECIPE_FOLDER, str(tmp_path / "sub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


in_a_folder = pytest.mark.usefixtures("folder")


def judged(
    weights: dict[str, float], response: str, row: dict | None = None, finish_reason: str = "stop"
) -> Judgement:
    return Rewards(weights, wrong=0.0).judge(
        Task(row or ROW, response, finish_reason, answer_key="solution")
    )


@in_a_folder
def test_ours() -> None:
    assert judged({"mine.py:ours": 1.0}, "2").score == 1.0
    assert judged({"sub/mine.py:ours": 1.0}, "2", finish_reason="length") == Judgement(
        Verdict.wrong, 0.25
    )


@in_a_folder
def test_a_reward_may_take_the_number_of_tokens() -> None:
    rewards = Rewards({"mine.py:short": 1.0}, wrong=0.0)
    task = Task(ROW, "2", answer_key="solution", response_tokens=100)
    assert rewards.judge(task).score == pytest.approx(0.9)


@in_a_folder
def test_verl_s() -> None:
    right = judged({"mine.py:verl": 1.0}, "2")
    wrong = judged({"mine.py:verl": 1.0}, "31")
    assert (right.verdict, right.score, wrong.verdict, wrong.score) == (
        Verdict.right,
        1.0,
        Verdict.wrong,
        -1.0,
    )
    assert wrong.details == {
        "own/acc": 0.0,
        "own/length": 2.0,
        "own/seen": 1.0,
        "own/index": 7.0,
        "own/stopped": 1.0,
    }
    assert judged({"mine.py:verl_without_extras": 1.0}, "").score == 1.0
    assert read({"score": 0.25, "acc": 0.25}).verdict == Verdict.wrong
    assert read(sum([0.1] * 10)).verdict == Verdict.right, "though the sum is a little less than 1"


@in_a_folder
def test_trl_s() -> None:
    assert judged({"mine.py:trl": 1.0}, "2").verdict == Verdict.right
    assert judged({"mine.py:trl": 1.0}, "3").verdict == Verdict.wrong
    plain = {"prompt": "1+1=", "solution": "2"}
    assert judged({"mine.py:trl_plain": 1.0}, "four", plain).score == pytest.approx(0.4)
    with pytest.raises(TypeError, match="argument: 'level'"):
        judged({"mine.py:trl": 1.0}, "2", plain)


@in_a_folder
def test_several_add_up_and_the_first_has_the_verdict() -> None:
    both = judged(
        {"exact_match": 1.0, "mine.py:trl_plain": 0.5}, "2", {"prompt": "1+1=", "solution": "2"}
    )
    assert both == Judgement(
        Verdict.right, 1.05, {"part/exact_match": 1.0, "part/mine.py:trl_plain": 0.1}, "2"
    )
    none = judged(
        {"exact_match": 1.0, "mine.py:trl_plain": 0.5}, "?", {"prompt": "1+1=", "solution": "2"}
    )
    assert (none.verdict, none.score) == (Verdict.wrong, 0.0)
    with pytest.raises(ValueError, match="no reward applies"):
        judged({"mine.py:trl_plain": 1.0}, "?", {"prompt": "", "solution": "2"})


@in_a_folder
def test_a_mapping_without_a_score_is_an_error() -> None:
    with pytest.raises(TypeError, match="without 'score'"):
        judged({"mine.py:no_score": 1.0}, "2")


@in_a_folder
def test_a_worker_hands_everything_over() -> None:
    pool = RewardPool(RewardSection(name={"mine.py:verl": 1.0, "mine.py:ours": 2.0}))
    pool.start()
    try:
        (score,) = pool.score([Task(ROW, "2", "length", answer_key="solution")])
    finally:
        pool.close()
    assert (score.reward, score.verdict, score.error) == (1.5, Verdict.right, None)
    assert score.details["own/stopped"] == 0.0 and score.details["part/mine.py:ours"] == 0.25


@in_a_folder
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere/mine.py:ours", "FileNotFoundError: no file "),
        ("mine.py:theirs", "has no attribute 'theirs'"),
        (
            "mine.py",
            "is not a built-in reward (exact_match, math_dapo, math_verify, reasoning_gym)",
        ),
    ],
)
def test_a_name_that_leads_nowhere(name: str, said: str) -> None:
    with pytest.raises(LookupError) as caught:
        Rewards({name: 1.0}, 0.0)
    assert said in str(caught.value)


GOOD = "def right(row, answer_key, response):\n    return 0.5\n"


@pytest.mark.fault(
    "a reward lies beside the recipe, the command runs elsewhere", "command and workers find it"
)
def test_beside_the_recipe(place: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RECIPE_FOLDER, "")
    (place / "sub" / "pack").mkdir(parents=True)
    (place / "sub" / "mine.yaml").write_text("base: ../mine.yaml\n")
    (place / "sub" / "beside_recipe.py").write_text(GOOD)
    (place / "sub" / "pack" / "inner.py").write_text(GOOD)
    (place / "where_it_runs.py").write_text(GOOD)
    (place / "sub" / "math.py").write_text(
        GOOD.replace("return 0.5", "import math; return math.sqrt(0.25)")
    )
    for name in ("beside_recipe:right", "pack.inner:right", "where_it_runs:right", "math.py:right"):
        command.dry_run(f"reward.name={name}", recipe="sub/mine.yaml")
        pool = RewardPool(RewardSection(name=name))
        pool.start()
        assert [score.reward for score in pool.score([Task({"answer": "1"}, "1")])] == [0.5]
        pool.close()
    assert "No module named 'beside_recipe'" in command.refused("reward.name=beside_recipe:right")
    command("plan", "mine.yaml", "reward.name=beside_recipe:right")  # calls no reward


MISTAKES = {
    "a syntax error": ("def right(row:\n", "SyntaxError: "),
    "an exception": ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
    "sys.exit": ("import sys; sys.exit(3)\n", "SystemExit: 3"),
    "the end of the process": (
        "import os; os._exit(0)\n",
        "the process for wrong:right died at its start",
    ),
    "two parameters": (
        "def right(row, response): ...\n",
        "is called as (row, answer_key, response)",
    ),
    "no function": ("right = 5\n", "is int, not a function"),
    "a coroutine": ("async def right(row, a, r): ...\n", "gives no number when it is called"),
}


@pytest.mark.fault(
    "a reward's module has a mistake, ends its process or crashes it", "the dry run says so"
)
@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes(kind: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text, said = MISTAKES[kind]
    (place / "wrong.py").write_text("print('noise')\n" + text)
    assert cli.main(["train", "mine.yaml", "--dry-run", "reward.name=wrong:right"]) == 2
    out, err = capfd.readouterr()
    errors = [line for line in err.splitlines() if line != "noise"]
    assert "noise" not in out
    assert len(errors) == 1, err
    assert errors[0].startswith("error: reward.name: ")
    assert said in errors[0]


@pytest.mark.usefixtures("place")
def test_a_name_that_is_near(command: Command) -> None:
    assert "did you mean exact_match?" in command.refused("reward.name=exact_macth")
