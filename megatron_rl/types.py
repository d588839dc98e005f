"""Data types passed between all parts: prompts, sampling parameters, sessions, rollouts, scores."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

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
    candidates: int = 0  # tokens whose logprobs tell what top_k and top_p have kept; 0: nobody asks
    tools: ToolFormat | None = None  # None: nobody asks for tool calls


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


@dataclass(frozen=True)
class Rollout:
    """A response, in arrays: a step of DAPO has a hundred million tokens."""

    prompt: Prompt
    group: int  # unique within a run: rollouts of one prompt in one draw share it
    sample: int  # which of the group's samples
    token_ids: Sequence[int]  # int32
    logprobs: Sequence[float]  # float32: the sampler's, NaN where it reported none
    loss_mask: Sequence[int]  # int8. 0: text the policy did not write (tools, other turns)
    finish_reason: str  # stop | length | abort
    policy_version: int  # of its first token, the oldest one
    format: str = ""  # weight format of the engine that answered; empty where there was none
    # int32: which tokens each was drawn among, one position after the other, and how many at each;
    # None: among all
    kept_ids: Sequence[int] | None = None
    kept_counts: Sequence[int] | None = None
    # int32: of each token, where an update came between them; None: all one
    versions: Sequence[int] | None = None
    # int32: the turn that each token was sampled in, -1: in none; None: all in one
    turns: Sequence[int] | None = None
    # float32: what each token's return differs from the reward, or its advantage:
    # environment.credit; None: the reward
    credit: Sequence[float] | None = None
    # [S, L, K] uint8 or int16: of the tokens that the engine has read, from the prompt's first on;
    # None: not told
    experts_SLK: np.ndarray | None = None
    session: Session | None = None  # None: a single answer
    row: int = 0  # which branch of the session

    def __post_init__(self) -> None:
        kinds = {
            "token_ids": "i",
            "logprobs": "f",
            "loss_mask": "b",
            "kept_ids": "i",
            "kept_counts": "i",
            "versions": "i",
            "turns": "i",
            "credit": "f",
        }
        for name, kind in kinds.items():
            values = getattr(self, name)
            if values is not None and (not isinstance(values, array) or values.typecode != kind):
                object.__setattr__(self, name, array(kind, np.asarray(values, kind).tobytes()))


def written(length: int, by_policy: bool = True) -> array[int]:
    """The loss mask of an answer that one hand wrote."""
    return array("b", [by_policy]) * length


NO_EXPERT = -1  # of a token whose experts nobody has told, or of a layer without
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
    verdict: Verdict | None = None  # None: nobody has judged it
    details: Mapping[str, float] = field(default_factory=dict)  # what else the reward measured
    answer: str | None = None  # what the reward found in the response: answers vote by it
