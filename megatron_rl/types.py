"""Data types that one part of the project hands to the next: prompts, rollouts, scored answers, batches.

Shape suffixes: B sequences, T response positions (right-padded), S positions of prompt + response (right-padded), N
rollouts. Every matrix with T is aligned to responses: column 0 is the first response token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_rl.config.schema import format_number

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """One question: token ids for the engine, the data set's row for the reward."""

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
    """How tool calls are found in an answer."""

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
    """What a conversation has come to; the rollouts of its branches share it."""

    turns: Sequence[SessionTurn]
    rows: int = 1  # branches: 1 where it never forked
    reward: float | None = None  # the sum of its turns'; None: the recipe's reward judges the last answer
    error: str | None = None  # why it has no reward
    end: str = "done"  # done | turns | length | refused | error
    numbers: Mapping[str, float] = field(default_factory=dict)  # the environment's, for the metrics
    counts: Mapping[str, float] = field(default_factory=dict)  # failed calls, cut observations, restarts, ...
    answer: str = ""  # the last answer's text
    conversation: str = ""  # all messages, as JSON, for the record


@dataclass(frozen=True)
class Rollout:
    """One answer. Whatever it is made of, it holds arrays: a step of DAPO's has a hundred million tokens."""

    prompt: Prompt
    group: int  # unique within a run: rollouts of one prompt in one draw share it
    sample: int  # which of the group's samples
    token_ids: Sequence[int]  # int32
    logprobs: Sequence[float]  # float32: the sampler's, NaN where it reported none
    loss_mask: Sequence[int]  # int8. 0: text the policy did not write (tools, other turns)
    finish_reason: str  # stop | length | abort
    policy_version: int  # of its first token, the oldest one
    format: str = ""  # weight format of the engine that answered; empty where there was none
    # int32: which tokens each was drawn among, one position after the other, and how many at each; None: among all
    kept_ids: Sequence[int] | None = None
    kept_counts: Sequence[int] | None = None
    versions: Sequence[int] | None = None  # int32: of each token, where an update came between them; None: all one
    turns: Sequence[int] | None = None  # int32: the turn that each token was sampled in, -1: in none; None: all in one
    kinds: Sequence[int] | None = None  # int8: of each token, its place in KINDS; None: all text
    # float32: what each token's return differs from the reward, or its advantage: environment.credit; None: the reward
    credit: Sequence[float] | None = None
    # [S, L, K] uint8 or int16: of the tokens that the engine has read, from the prompt's first on; None: not told
    experts_SLK: np.ndarray | None = None
    session: Session | None = None  # None: a single answer
    row: int = 0  # which branch of the session

    def __post_init__(self) -> None:
        kinds = {"token_ids": "i", "logprobs": "f", "loss_mask": "b", "kept_ids": "i", "kept_counts": "i"}
        for name, kind in {**kinds, "versions": "i", "turns": "i", "kinds": "b", "credit": "f"}.items():
            values = getattr(self, name)
            if values is not None and (not isinstance(values, array) or values.typecode != kind):
                object.__setattr__(self, name, array(kind, np.asarray(values, kind).tobytes()))


KINDS = ("text", "thinking", "tool_call")  # of tokens that a policy has written
TEXT, THINKING, CALL = range(3)


def written(length: int, by_policy: bool = True) -> array[int]:
    """The loss mask of an answer that one hand wrote."""
    return array("b", [by_policy]) * length


NO_EXPERT = -1  # of a token whose experts nobody has told, or of a layer without
RIGHT = 1.0  # the reward of a right answer


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
    error: str | None = None  # why there is none (a timeout, an exception): the answer is not trained on
    text: str = ""
    verdict: Verdict | None = None  # None: nobody has judged it
    details: Mapping[str, float] = field(default_factory=dict)  # what else the reward measured
    answer: str | None = None  # what the reward found in the response: answers vote by it


@dataclass(frozen=True)
class Batch:
    """The global batch of a step, as every rank holds it. Rows of a group are neighbours."""

    tokens_BS: torch.Tensor  # int64, prompt then response, padded with 0
    prompt_lengths_B: torch.Tensor
    response_lengths_B: torch.Tensor
    mask_BT: torch.Tensor  # bool: trained-on response tokens
    sampler_logprobs_BT: torch.Tensor  # float32
    rewards_B: torch.Tensor  # float32, NaN where there is no score
    groups_B: torch.Tensor  # int64
    versions_B: torch.Tensor  # int64: policy version that sampled the row, its first token
    formats_B: torch.Tensor | None = None  # int64: place of the sampler's weight format in schema.Format; -1: unknown
    # int32: how many tokens each was drawn among, and which, row after row; None: among all
    kept_counts_BT: torch.Tensor | None = None
    kept_ids_K: torch.Tensor | None = None
    versions_BT: torch.Tensor | None = None  # int64: of each token, where an update came between some; None: nowhere
    samples_B: torch.Tensor | None = None  # int64: which of its group's sessions a row is of; None: each row is its own
    turns_BT: torch.Tensor | None = None  # int64: the turn that a token was sampled in, -1: in none; None: all in one
    kinds_BT: torch.Tensor | None = None  # int8: see Rollout.kinds
    credit_BT: torch.Tensor | None = None  # float32: see Rollout.credit
    experts_BSLK: torch.Tensor | None = None  # int8, int16: what the engine chose, -1 where not told; None: nowhere

    def __len__(self) -> int:
        return int(self.tokens_BS.shape[0])

    @property
    def token_versions_BT(self) -> torch.Tensor:
        return self.versions_B[:, None].expand_as(self.mask_BT) if self.versions_BT is None else self.versions_BT

    def rows(self, index: torch.Tensor) -> Batch:
        parts = _rows(self, index, without="kept_ids_K")
        if self.kept_ids_K is not None:
            parts["kept_ids_K"] = self.kept_of(index)
        return Batch(**parts)

    def kept_of(self, rows: torch.Tensor) -> torch.Tensor:
        """`kept_ids_K` of some rows, in their order."""
        import torch

        assert self.kept_ids_K is not None and self.kept_counts_BT is not None
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        whole = self.kept_ids_K.split(self.kept_counts_BT.sum(dim=1).tolist())
        return torch.cat([self.kept_ids_K[:0], *(whole[row] for row in rows.tolist())])


def _rows(tensors: object, index: torch.Tensor, without: str = "") -> dict[str, Any]:
    named = {name: value for name, value in vars(tensors).items() if name != without}
    return {name: None if value is None else value[index] for name, value in named.items()}


def collate(scored: Sequence[Scored]) -> Batch:
    """Rows of one batch."""
    import torch

    rollouts = [one.rollout for one in scored]
    return Batch(
        tokens_BS=padded([(one.prompt.token_ids, one.token_ids) for one in rollouts], torch.int64),
        prompt_lengths_B=torch.tensor([len(one.prompt.token_ids) for one in rollouts]),
        response_lengths_B=torch.tensor([len(one.token_ids) for one in rollouts]),
        mask_BT=padded([(one.loss_mask,) for one in rollouts], torch.bool),
        sampler_logprobs_BT=padded([(one.logprobs,) for one in rollouts], torch.float32),
        rewards_B=torch.tensor([one.reward if one.error is None else math.nan for one in scored], dtype=torch.float32),
        groups_B=torch.tensor([one.group for one in rollouts]),
        versions_B=torch.tensor([one.policy_version for one in rollouts]),
        formats_B=torch.tensor([format_number(one.format) for one in rollouts]),
        versions_BT=_versions(rollouts),
        **_kept(rollouts),
        experts_BSLK=_experts(rollouts),
        **_sessions(rollouts),
    )


def _versions(rollouts: Sequence[Rollout]) -> torch.Tensor | None:
    if all(one.versions is None for one in rollouts):
        return None
    import torch

    rows = [one.versions or array("i", [one.policy_version]) * len(one.token_ids) for one in rollouts]
    return padded([(row,) for row in rows], torch.int64)


def _experts(rollouts: Sequence[Rollout]) -> torch.Tensor | None:
    told = [one.experts_SLK for one in rollouts if one.experts_SLK is not None]
    if not told:
        return None
    import torch

    longest = max(len(one.prompt.token_ids) + len(one.token_ids) for one in rollouts)
    small = all(one.max(initial=0) < 128 for one in told)
    shape, kind = (len(rollouts), longest, *told[0].shape[1:]), torch.int8 if small else torch.int16
    chosen_BSLK = torch.full(shape, NO_EXPERT, dtype=kind)
    for place, one in enumerate(rollouts):
        if one.experts_SLK is not None:
            chosen_BSLK[place, : len(one.experts_SLK)] = torch.from_numpy(one.experts_SLK.astype(np.int16))
    return chosen_BSLK


def _sessions(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    if all(one.session is None for one in rollouts):
        return {}
    import torch

    turns = [(one.turns or array("i", [-1]) * len(one.token_ids),) for one in rollouts]
    kinds = [(one.kinds or array("b", [0]) * len(one.token_ids),) for one in rollouts]
    found = {
        "samples_B": torch.tensor([one.sample for one in rollouts]),
        "kinds_BT": padded(kinds, torch.int8),
        "turns_BT": padded(
            [tuple(array("i", [number + 1 for number in one]) for one in row) for row in turns], torch.int64
        )
        - 1,
    }
    if any(one.credit is not None for one in rollouts):
        credit = [(one.credit or array("f", [0.0]) * len(one.token_ids),) for one in rollouts]
        found["credit_BT"] = padded(credit, torch.float32)
    return found


def _kept(rollouts: Sequence[Rollout]) -> dict[str, torch.Tensor]:
    if all(one.kept_ids is None for one in rollouts):
        return {}
    import torch

    counts = [one.kept_counts for one in rollouts if one.kept_counts is not None]
    ids = [one.kept_ids for one in rollouts if one.kept_ids is not None]
    if len(ids) < len(rollouts):
        raise ValueError(f"{len(rollouts) - len(ids)} of {len(rollouts)} answers do not say what they were drawn among")
    return {
        "kept_counts_BT": padded([(one,) for one in counts], torch.int32),
        "kept_ids_K": padded([tuple(ids)], torch.int32)[0, : sum(map(len, ids))],
    }


def padded(rows: Sequence[tuple[Sequence[float], ...]], dtype: torch.dtype) -> torch.Tensor:
    """One row each, its parts one after the other, with zeros on the right; at least one column."""
    import torch

    width = max((1, *(sum(map(len, parts)) for parts in rows)))
    table = torch.zeros(len(rows), width, dtype=dtype)
    for row, parts in zip(table.numpy(), rows, strict=True):
        start = 0
        for part in parts:
            row[start : start + len(part)] = part
            start += len(part)
    return table


@dataclass(frozen=True)
class LossInputs:
    """Everything a policy loss may look at; rows of one micro-batch."""

    logprobs_BT: torch.Tensor  # pi, carries the gradient
    anchor_logprobs_BT: torch.Tensor | None  # p; mu where there was no prox pass for p; None: pi itself, a constant
    sampler_logprobs_BT: torch.Tensor
    ref_logprobs_BT: torch.Tensor | None
    entropy_BT: torch.Tensor | None
    advantages_B: torch.Tensor
    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    denominator_mask_BT: torch.Tensor
    prompt_ids_B: torch.Tensor
    selected_BT: torch.Tensor | None = None
    turns_BT: torch.Tensor | None = None  # see Batch
    advantages_BT: torch.Tensor | None = None  # of each token; None: its row's
    staleness_BT: torch.Tensor | None = None  # see Targets


@dataclass(frozen=True)
class Targets:
    """What the loss needs beside the policy's own forward pass: one optimizer update's worth, global.

    Rows match `batch`. Without an anchor, weights and masks are what is known before the loss, which completes them.
    """

    batch: Batch
    # p; the sampler's mu where correction.anchor is not prox; None: what the update's own forward pass gives
    anchor_logprobs_BT: torch.Tensor | None
    ref_logprobs_BT: torch.Tensor | None
    advantages_B: torch.Tensor
    weights_BT: torch.Tensor
    mask_BT: torch.Tensor
    denominator_mask_BT: torch.Tensor
    selected_BT: torch.Tensor | None = None
    advantages_BT: torch.Tensor | None = None  # of each token; None: its row's
    staleness_BT: torch.Tensor | None = None  # updates since the token was sampled; for correction.anchor interpolated

    def rows(self, index: torch.Tensor) -> Targets:
        return Targets(self.batch.rows(index), **_rows(self, index, without="batch"))


@dataclass(frozen=True)
class OwnPass:
    """What an update without an anchor found on its way: the pass that was not made before it."""

    logprobs_BT: torch.Tensor  # the policy's before the update; NaN in rows that nothing was trained on
    seconds: float  # of its forward pass, on this rank
