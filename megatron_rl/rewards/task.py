"""Types of our rewards: Task (row, response), Judgement (verdict, score), Score; `verifier`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.types import Verdict


@dataclass(frozen=True)
class Task:
    """A response to judge, with its data row, whose keys are `prompt_key` and `answer_key`."""

    row: Mapping[str, Any]
    response: str
    finish_reason: str = "stop"  # stop | length | abort
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    # tokens of the response; of a conversation: those that the policy wrote
    response_tokens: int = 0

    @property
    def answer(self) -> str:
        return str(self.row[self.answer_key])


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    score: float | None = None  # None: 1 or reward.wrong, by the verdict
    # further numbers of the reward, for the metrics
    details: Mapping[str, float] = field(default_factory=dict)
    # answer extracted from the response; equal answers have equal text
    answer: str | None = None


@dataclass(frozen=True)
class Score:
    """Result of a task, as a worker returns it."""

    reward: float
    verdict: Verdict
    error: str | None = None  # why there is no score
    details: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    away: bool = False  # True if a failed connection caused the error


# None: this reward does not apply to this row
Reward = Callable[[Task], Judgement | None]


def verifier(judge: Callable[[Task], Judgement]) -> Reward:
    """Wrap a verifier so that truncated responses are wrong: their last text is no answer."""
    return lambda task: judge(task) if task.finish_reason == "stop" else Judgement(Verdict.wrong)


def right_or_wrong(right: bool, answer: str | None = None) -> Judgement:
    return Judgement(Verdict.right if right else Verdict.wrong, answer=answer)
