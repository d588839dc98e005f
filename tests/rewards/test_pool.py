"""Rewards run apart: order, exceptions, deadlines and deaths become scores with a reason, never a hang."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import RewardSection
from megatron_rl.rewards.pool import RewardPool, Score

MODULE = """
import os, time

def by_word(row, answer_key, response):
    print("what a reward prints is not an answer")
    if response == "sleep":
        time.sleep(30)
    if response == "raise":
        raise ValueError("no digits")
    if response == "die":
        os._exit(7)
    if response == "nan":
        return float("nan")
    return float(response)
"""


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RewardPool]:
    (tmp_path / "odd_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    pool = RewardPool(RewardSection(name="odd_rewards:by_word", workers=2, timeout_s=1.0), "answer")
    pool.start()
    yield pool
    pool.close()


def test_scores_come_in_the_order_of_the_tasks() -> None:
    pool = RewardPool(RewardSection(workers=3), "answer")
    pool.start()
    try:
        tasks = [({"answer": str(index)}, f" {index if index % 3 else 'wrong'}\n") for index in range(20)]
        assert [score.reward for score in pool.score(tasks)] == [float(bool(index % 3)) for index in range(20)]
    finally:
        pool.close()


def test_one_bad_answer_does_not_touch_the_others(odd: RewardPool) -> None:
    begun = time.monotonic()
    scores = odd.score([({}, word) for word in ("1", "raise", "2", "sleep", "3", "die", "4", "5")])
    assert [score.reward for score in scores] == [1, 0, 2, 0, 3, 0, 4, 5]
    assert [bool(score.error) for score in scores] == [False, True, False, True, False, True, False, False]
    assert "no digits" in str(scores[1].error)
    assert "reward.timeout_s=1" in str(scores[3].error)
    assert "died" in str(scores[5].error)
    assert time.monotonic() - begun < 20
    assert [score.reward for score in odd.score([({}, "6"), ({}, "7")])] == [6, 7]


def test_a_score_that_is_no_number_is_an_error(odd: RewardPool) -> None:
    (score,) = odd.score([({}, "nan")])
    assert "nan" in str(score.error)


def test_closing_does_not_wait_for_the_tasks_that_are_left(odd: RewardPool) -> None:
    scores: list[Score] = []
    scoring = threading.Thread(target=lambda: scores.extend(odd.score([({}, "sleep")] * 40)))
    scoring.start()
    time.sleep(0.3)
    begun = time.monotonic()
    odd.close()
    scoring.join(5)
    assert time.monotonic() - begun < 5
    assert len(scores) == 40
    assert all(score.error for score in scores)


@pytest.mark.parametrize("name", ["exact_macth", "no.such.module:f", "json:nothing"])
def test_a_reward_that_cannot_be_imported_is_named(name: str) -> None:
    pool = RewardPool(RewardSection(name=name), "answer")
    with pytest.raises(ConfigError, match=r"reward\.name"):
        pool.start()
    pool.close()
