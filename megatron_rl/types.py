"""Data types passed between all parts: prompts, sampling parameters, completions, sessions,
rollouts, scores.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """A prompt: token ids for the engine, the data set's row for the reward."""

    id: int  # stable: the row's number in the data set
    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]
    prompt_key: str = "prompt"  # where the row has its prompt and its answer
    answer_key: str = "answer"

    @property
    def answer(self) -> Any:
        return self.row.get(self.answer_key)


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls in a response."""

    parser: str  # one of vLLM's
    schemas: str  # of the tools, as JSON


@dataclass(frozen=True)
class SamplingParams:
    samples: int
    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] = ()
    candidates: int = 0  # number of top logprobs that show the sampling support; 0: not requested
    tools: ToolFormat | None = None  # None: tool calls are not parsed


@dataclass(frozen=True)
class SessionTurn:
    """An answer of a conversation, and what followed it."""

    reward: float | None = None
    advantage: float | None = None  # the environment's own
    tool_calls: int = 0
    tool_seconds: float = 0.0
    tokens: int = 0
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Session:
    """Results of a conversation, shared by the rollouts of its branches."""

    turns: Sequence[SessionTurn]
    rows: int = 1  # branches: 1 where it never forked
    # the sum of its turns'; None: the recipe's reward judges the last answer
    reward: float | None = None
    error: str | None = None  # why it has no reward
    end: str = "done"  # done | turns | length | refused | error
    numbers: Mapping[str, float] = field(default_factory=dict)  # the environment's, for the metrics
    # failed calls, cut observations, restarts, ...
    counts: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""  # the last answer's text
    conversation: str = ""  # what was asked in the last branch, as JSON, for the record


FinishReason = Literal["stop", "length", "abort"]
if TYPE_CHECKING:  # any sequence becomes an array
    Ints = Sequence[int]
    Floats = Sequence[float]
else:  # before Python 3.12 an array takes no parameter where the program runs
    Ints = Floats = array
# of a completion's and a rollout's columns; int32, float32, int8
TYPE_CODES = {
    "token_ids": "i",
    "logprobs": "f",
    "versions": "i",
    "kept_ids": "i",
    "kept_counts": "i",
    "loss_mask": "b",
    "turns": "i",
    "credit": "f",
}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the engine found in an answer."""

    name: str
    arguments: str  # JSON, or what was meant to be


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The tokens that an engine sampled for one request, in arrays: a step of DAPO has a hundred
    million. It travels from the engine as it is (`processes/channel.py`).
    """

    token_ids: Ints
    logprobs: Floats  # the sampler's, NaN where it reported none
    finish_reason: FinishReason
    policy_version: int  # of its first token, the oldest one
    versions: Ints | None = None  # of each token, where an update came between; None: all one
    # which tokens each was drawn among, one position after the other, and how many at each;
    # None: among all
    kept_ids: Ints | None = None
    kept_counts: Ints | None = None
    # [S, L, K] uint8, int16 or uint16: of the tokens that the engine has read, from the prompt's
    # first on; None: not reported
    experts_SLK: np.ndarray | None = None
    content: str | None = None  # the text without tool calls; None: not parsed
    calls: Sequence[ToolCall] = ()

    def __post_init__(self) -> None:
        for name, code in TYPE_CODES.items():
            values = getattr(self, name, None)
            if values is not None and (not isinstance(values, array) or values.typecode != code):
                object.__setattr__(self, name, array(code, np.asarray(values, code).tobytes()))

    @property
    def all_versions(self) -> set[int]:
        """The policy versions that its tokens were sampled by."""
        return {self.policy_version, *(self.versions or ())}

    def first(self, count: int, prompt: int) -> Self:
        """Its first tokens, as if it had ended there by itself; `prompt`: tokens of the request."""
        counts = self.kept_counts and self.kept_counts[:count]
        versions = self.versions and self.versions[:count]
        experts_SLK = self.experts_SLK
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason="stop",
            versions=versions if len(set(versions or ())) > 1 else None,
            kept_ids=self.kept_ids and self.kept_ids[: sum(counts or ())],
            kept_counts=counts,
            experts_SLK=None if experts_SLK is None else experts_SLK[: prompt + count - 1],
        )


NOTHING = Completion(
    token_ids=array("i"), logprobs=array("f"), finish_reason="abort", policy_version=0
)


@dataclass(frozen=True, kw_only=True)
class Rollout(Completion):
    """A row to train on: a completion of a prompt, or a branch of a session."""

    prompt: Prompt
    group: int  # unique within a run: rollouts of one prompt in one draw share it
    sample: int  # which of the group's samples
    loss_mask: Sequence[int]  # 0: text the policy did not write (tools, other turns)
    format: str = ""  # weight format of the engine that answered; empty where there was none
    # the turn that each token was sampled in, -1: in none; None: all in one
    turns: Sequence[int] | None = None
    # what each token's return differs from the reward, or its advantage: environment.credit;
    # None: the reward
    credit: Sequence[float] | None = None
    session: Session | None = None  # None: a single answer
    row: int = 0  # which branch of the session


def written(length: int, by_policy: bool = True) -> array[int]:
    """The loss mask of an answer that one hand wrote."""
    return array("b", [by_policy]) * length


NO_EXPERT = -1  # marks a token without reported experts, or a layer without experts
LARGEST_NUMBER = 1e30  # of rewards and what is reported beside: sums of them are finite in float32
RIGHT = 1.0  # the reward of a right answer
NEARLY_RIGHT = RIGHT - 1e-6  # where parts of it were added up


class Verdict(StrEnum):
    right = "right"
    wrong = "wrong"
    no_answer = "no_answer"  # none was found in the response
    timeout = "timeout"
    error = "error"


@dataclass(frozen=True)
class Scored:
    rollout: Rollout
    reward: float  # 0 where there is no score
    # why there is none (a timeout, an exception): the answer is not trained on
    error: str | None = None
    text: str = ""
    verdict: Verdict | None = None  # None: not judged
    details: Mapping[str, float] = field(default_factory=dict)  # what else the reward measured
    answer: str | None = None  # what the reward found in the response: answers vote by it
