"""Environment of reasoning-gym's tasks with feedback: a wrong answer gets a sentence and another
try, the best counts.

Reward `reasoning_gym`, whose rows these are, judges each answer; `discount` is a factor for each
try before it.
"""

from collections.abc import Mapping
from typing import Any

from megatron_rl.environments.environment import Answer, Step
from megatron_rl.rewards.reasoning_gym import reward
from megatron_rl.rewards.task import Task
from megatron_rl.types import RIGHT, Verdict

FEEDBACK = (
    "That answer is not right: its score is {score:.2f} of 1. Think again, and answer once more."
)


class Environment:
    """A conversation of at most `tries` answers about one task."""

    def __init__(
        self,
        tries: int = 3,
        feedback: str = FEEDBACK,
        discount: float = 1.0,
        answer_key: str = "answer",
    ) -> None:
        feedback.format(score=0.0)
        self._tries = tries
        self._feedback = feedback
        self._discount = discount
        self._key = answer_key
        self._row: Mapping[str, Any] = {}
        self._best = 0.0
        self._tried = 0

    def reset(self, row: Mapping[str, Any]) -> Any:
        self._row = row
        if row.get("prompt"):
            return row["prompt"]
        return row["question"]

    def step(self, answer: Answer) -> Step:
        judged = reward(Task(self._row, answer.content, answer.finish_reason, answer_key=self._key))
        assert judged is not None
        right = judged.verdict == Verdict.right
        score = judged.score if judged.score is not None else RIGHT if right else 0.0
        worth = score * self._discount**self._tried
        gained = max(0.0, worth - self._best)
        self._best = max(worth, self._best)
        self._tried += 1
        done = right or self._tried >= self._tries
        numbers = {"score": score, "tries": float(self._tried)}
        return Step(() if done else self._feedback.format(score=score), gained, done, numbers)
