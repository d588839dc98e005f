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

Metrics = dict[str, float]  # by name, as in tracking/metrics.yaml


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
    top_logprobs: int = 0  # maximum number of top tokens with each sampled token; 0: none
    top_mass: float = 1.0  # probability beyond which no more top tokens are returned
    tools: ToolFormat | None = None  # None: tool calls are not parsed


@dataclass(frozen=True)
class SessionTurn:
    """A response in a conversation, and the reply to it."""

    reward: float | None = None
    advantage: float | None = None  # set by the environment
    tool_calls: int = 0
    tool_seconds: float = 0.0
    tokens: int = 0
    finish_reason: str = "stop"


@dataclass(frozen=True)
class Session:
    """Results of a conversation, shared by the rollouts of its branches."""

    turns: Sequence[SessionTurn]
    rows: int = 1  # branches: 1 where it never forked
    # the sum of its turns' rewards; None: the recipe's reward scores the last response
    reward: float | None = None
    error: str | None = None  # reason if it has no reward
    end: str = "done"  # done | turns | length | refused | error
    numbers: Mapping[str, float] = field(default_factory=dict)  # metrics of the environment
    # failed calls, cut observations, restarts, ...
    counts: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""  # text of the last response
    conversation: str = ""  # messages of the last branch, as JSON, for the record


FinishReason = Literal["stop", "length", "abort"]
if TYPE_CHECKING:  # any sequence becomes an array
    Ints = Sequence[int]
    Floats = Sequence[float]
else:  # before Python 3.12 an array takes no parameter where the program runs
    Ints = Floats = array
# of a completion's and a rollout's columns; int32, float32, int16, int8
TYPE_CODES = {
    "token_ids": "i",
    "logprobs": "f",
    "versions": "i",
    "kept_ids": "i",
    "kept_counts": "i",
    "top_counts": "h",
    "top_ids": "i",
    "loss_mask": "b",
    "turns": "i",
    "credit": "f",
}


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the engine parsed from a response."""

    name: str
    arguments: str  # JSON, possibly invalid


@dataclass(frozen=True, kw_only=True)
class Completion:
    """Tokens that an engine sampled for one request, in arrays: a step of DAPO has a hundred
    million. Sent from the engine unchanged (`processes/channel.py`).
    """

    token_ids: Ints
    logprobs: Floats  # the sampler's, NaN if not reported
    finish_reason: FinishReason
    policy_version: int  # of its first token, the oldest version
    versions: Ints | None = None  # of each token, if an update interrupted it; None: one version
    # sampling support of each token, concatenated, and its size at each; None: the whole vocabulary
    kept_ids: Ints | None = None
    kept_counts: Ints | None = None
    # top tokens at each token: the sampler's most likely tokens there, most likely first, and
    # their logprobs (float16), concatenated, and their number at each; None: not requested
    top_counts: Ints | None = None
    top_ids: Ints | None = None
    top_logprobs: np.ndarray | None = None
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
        """Return its first tokens, as if it had ended there; `prompt`: number of prompt tokens."""
        counts = self.kept_counts and self.kept_counts[:count]
        top_counts = self.top_counts and self.top_counts[:count]
        top = sum(top_counts or ())
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
            top_counts=top_counts,
            top_ids=self.top_ids and self.top_ids[:top],
            top_logprobs=None if self.top_logprobs is None else self.top_logprobs[:top],
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
    sample: int  # index of the sample in its group
    loss_mask: Sequence[int]  # 0: text not written by the policy (tools, other turns)
    format: str = ""  # weight format of the engine; empty if there was none
    # the turn that each token was sampled in, -1: in none; None: all in one
    turns: Sequence[int] | None = None
    # difference of each token's return from the reward, or its advantage (environment.credit);
    # None: the reward
    credit: Sequence[float] | None = None
    session: Session | None = None  # None: a single response
    row: int = 0  # index of the branch in the session


def written(length: int, by_policy: bool = True) -> array[int]:
    """Return the loss mask of a response with a single author."""
    return array("b", [by_policy]) * length


NO_EXPERT = -1  # marks a token without reported experts, or a layer without experts
LARGEST_NUMBER = 1e30  # bound of rewards and reported numbers, so that float32 sums are finite
RIGHT = 1.0  # reward of a right response
NEARLY_RIGHT = RIGHT - 1e-6  # tolerance for a reward added up from parts


class Verdict(StrEnum):
    right = "right"
    wrong = "wrong"
    no_answer = "no_answer"  # none was found in the response
    timeout = "timeout"
    error = "error"


@dataclass(frozen=True)
class Scored:
    rollout: Rollout
    reward: float  # 0 if there is no score
    # reason if there is no score (timeout, exception); the response is then not trained on
    error: str | None = None
    text: str = ""
    verdict: Verdict | None = None  # None: not judged
    details: Mapping[str, float] = field(default_factory=dict)  # further numbers of the reward
    answer: str | None = None  # answer extracted from the response; used for majority votes
