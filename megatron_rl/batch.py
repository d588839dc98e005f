"""Batch of a step, in columns: rows of unlike lengths, the entries of one behind those of the row
before. `UpdateInputs`, the columns that a loss reads; `Share`, the rows that a replica has of a batch.

Shape suffixes: B rows, N response tokens of all rows, P tokens of all rows (each row's prompt, then
its response), L layers, K ids or experts, E top tokens at all tokens.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import format_number
from megatron_rl.segments import Segments
from megatron_rl.types import NO_EXPERT, Rollout, Scored


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Columns of ragged rows. The last letter of a column's name says what it has an entry for: each
    row (B), response token (N), token (P) or, of the ids kept at each token, each id (K); of the top
    tokens at each token, each of them (E).
    """

    prompt_lengths_B: Tensor  # int64
    response_lengths_B: Tensor
    groups_B: Tensor  # int64: id of the responses to one prompt of one draw

    def __len__(self) -> int:
        return len(self.response_lengths_B)

    @property
    def lengths_B(self) -> Tensor:
        return self.prompt_lengths_B + self.response_lengths_B

    @cached_property
    def responses(self) -> Segments:
        """The rows as segments of response tokens."""
        return Segments.rows(self.response_lengths_B, int(self.response_lengths_B.sum()))

    @property
    def columns(self) -> dict[str, Tensor]:
        """The columns that there are, by name."""
        named = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: column for name, column in named if isinstance(column, Tensor)}

    def rows(self, index: Tensor) -> Self:
        """Some rows, in the order of `index`."""
        parts: dict[str, Any] = {one.name: None for one in fields(self)}
        return type(self)(**parts | {name: self.taken(name, index) for name in self.columns})

    def taken(self, name: str, index: Tensor) -> Tensor:
        """The rows' part of a column, in the order of `index`."""
        column = self.columns[name]
        if name.endswith("_B"):
            return column[index]
        sizes_B = self.sizes(name)
        starts = (sizes_B.cumsum(0) - sizes_B)[index].tolist()
        parts = [
            column[start : start + size]
            for start, size in zip(starts, sizes_B[index].tolist(), strict=True)
        ]
        # an index of every token would take more memory than the column
        return torch.cat(parts) if parts else column[:0]

    def sizes(self, name: str) -> Tensor:
        """Entries of a column in each row."""
        if name.endswith("_B"):
            return torch.ones_like(self.response_lengths_B)
        if name.endswith("_E"):
            return self.top_sizes_B
        return self.response_lengths_B if name.endswith("_N") else self.lengths_B

    @cached_property
    def top_sizes_B(self) -> Tensor:
        """Top tokens in each row."""
        return self.responses.sum(self.columns["top_counts_N"].double()).long()


def places_of(sizes_B: Tensor, index: Tensor) -> Tensor:
    """Return the indices of the entries of some rows in a column with `sizes_B` entries per row."""
    taken = sizes_B[index]
    # where each taken row begins, in the column and in the result
    gaps = (sizes_B.cumsum(0) - sizes_B)[index] - (taken.cumsum(0) - taken)
    return torch.repeat_interleave(gaps, taken) + torch.arange(int(taken.sum()))


@dataclass(frozen=True, kw_only=True)
class Table(Rows):
    """Columns of a batch with one value a row: what every rank knows of all rows."""

    rewards_B: Tensor  # float32, NaN where there is no score
    versions_B: Tensor  # int64: policy version that sampled the row, its first token
    # int64: place of the sampler's weight format in schema.Format; -1: unknown
    formats_B: Tensor | None = None
    # int64: which of its group's sessions a row is of; None: each row is its own
    samples_B: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Batch(Table):
    """Global batch of a step, or a replica's part of it. Rows of a group are neighbours."""

    tokens_P: Tensor  # int32: of each row, prompt and then response
    mask_N: Tensor  # bool: trained-on response tokens
    sampler_logprobs_N: Tensor  # float32
    # int32: size and ids of each token's sampling support; None: the whole vocabulary
    kept_counts_N: Tensor | None = None
    kept_ids_K: Tensor | None = None
    # int16: number of top tokens at each token, 0: the policy did not sample it; None: no top logprobs
    top_counts_N: Tensor | None = None
    top_ids_E: Tensor | None = None  # int32
    top_logprobs_E: Tensor | None = None  # float16: the sampler's
    # int8, int16: experts that the engine chose, -1 if not reported; None: none reported
    experts_PLK: Tensor | None = None
    # int32: of each token, where an update came between some; None: nowhere
    versions_N: Tensor | None = None
    # int32: the turn that a token was sampled in, -1: in none; None: all in one
    turns_N: Tensor | None = None
    credit_N: Tensor | None = None  # float32: see Rollout.credit

    def sizes(self, name: str) -> Tensor:
        if name.endswith("LK"):
            return self.lengths_B
        if name.endswith("_K"):
            return self.kept_sizes_B
        return super().sizes(name)

    @cached_property
    def kept_sizes_B(self) -> Tensor:
        """Entries of `kept_ids_K` in each row."""
        assert self.kept_counts_N is not None
        return self.responses.sum(self.kept_counts_N.double()).long()

    @property
    def top_sampled_E(self) -> Tensor | None:
        """bool: which top tokens were sampled."""
        if self.top_ids_E is None or self.top_counts_N is None:
            return None
        rows = Segments.rows(self.lengths_B, len(self.tokens_P))
        responses_P = rows.place_N >= rows.at_tokens(self.prompt_lengths_B)
        sampled_N = self.tokens_P[responses_P]
        return self.top_ids_E == sampled_N.repeat_interleave(self.top_counts_N.long())

    @property
    def table(self) -> Table:
        return Table(**{one.name: getattr(self, one.name) for one in fields(Table)})

    @cached_property
    def turns(self) -> Segments | None:
        """The turns as segments of response tokens."""
        return None if self.turns_N is None else Segments.turns(self.turns_N, self.responses)

    @property
    def token_versions_N(self) -> Tensor:
        """int64: the policy version that each token was sampled by."""
        if self.versions_N is not None:
            return self.versions_N.long()
        return self.responses.at_tokens(self.versions_B)


@dataclass(frozen=True, kw_only=True)
class UpdateInputs(Rows):
    """Columns that a loss reads, beside the policy's own logprobs. Without an anchor, the loss
    completes the weights and masks.
    """

    sampler_logprobs_N: Tensor
    # p; the sampler's mu where correction.anchor is not prox; None: what the update's own forward
    # pass gives
    anchor_logprobs_N: Tensor | None
    ref_logprobs_N: Tensor | None
    advantages_B: Tensor
    weights_N: Tensor
    mask_N: Tensor
    denominator_mask_N: Tensor
    selected_N: Tensor | None = None
    advantages_N: Tensor | None = None  # of each token; None: its row's
    # steps (policy versions) since the token was sampled; for correction.anchor interpolated
    staleness_N: Tensor | None = None
    turns_N: Tensor | None = None  # see Batch
    # top tokens of the rows: see Batch; None: the loss reads no top logprobs
    top_counts_N: Tensor | None = None
    top_logprobs_E: Tensor | None = None  # float16: the sampler's
    top_sampled_E: Tensor | None = None  # bool: the sampled tokens; for a metric of centering
    top_anchor_E: Tensor | None = None  # float32: p of each; None: there was no proximal pass
    # float32: weights of score centering, of top tokens and tails; None: the loss completes them
    top_weights_E: Tensor | None = None
    tail_weights_N: Tensor | None = None

    @cached_property
    def turns(self) -> Segments | None:
        return None if self.turns_N is None else Segments.turns(self.turns_N, self.responses)


class Replicas(Protocol):
    """The learner's replicas, each of which has some rows of a batch; all call these together."""

    @property
    def place(self) -> int: ...

    def sum(self, values: Tensor) -> Tensor: ...

    def largest(self, values: Tensor) -> Tensor: ...

    def gather(self, values: Tensor) -> list[Tensor]: ...


class OneReplica:
    """The only replica, with all rows."""

    place = 0

    def sum(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        return [values]


@dataclass(frozen=True)
class Share:
    """A replica's rows of a batch, and the table of all rows."""

    batch: Batch
    all: Table
    rows_of: Sequence[Tensor]  # of each replica: places of its rows in the table, ascending
    replicas: Replicas = field(default_factory=OneReplica)
    minibatches: Sequence[Tensor] = ()  # rows of the table for each update of the step

    @classmethod
    def alone(cls, batch: Batch) -> "Share":
        every = torch.arange(len(batch))
        return cls(batch, batch.table, [every], minibatches=[every])

    @property
    def own(self) -> Tensor:
        """int64: the places of the replica's rows in the table."""
        return self.rows_of[self.replicas.place]

    def everywhere(self, values_B: Tensor) -> Tensor:
        """Values of the replica's rows as those of all rows, on every rank."""
        all_B = torch.zeros(len(self.all), *values_B.shape[1:], dtype=torch.float64)
        all_B[self.own] = values_B.double()
        return self.replicas.sum(all_B).to(values_B.dtype)


def collate(scored: Sequence[Scored]) -> Batch:
    """Rows of one batch."""
    rollouts = [one.rollout for one in scored]
    return Batch(
        prompt_lengths_B=torch.tensor(
            [len(one.prompt.token_ids) for one in rollouts], dtype=torch.int64
        ),
        response_lengths_B=torch.tensor(
            [len(one.token_ids) for one in rollouts], dtype=torch.int64
        ),
        tokens_P=joined(
            [part for one in rollouts for part in (one.prompt.token_ids, one.token_ids)], "int32"
        ),
        mask_N=joined([one.loss_mask for one in rollouts], "int8").bool(),
        sampler_logprobs_N=joined([one.logprobs for one in rollouts], "float32"),
        rewards_B=torch.tensor(
            [one.reward if one.error is None else math.nan for one in scored], dtype=torch.float32
        ),
        groups_B=torch.tensor([one.group for one in rollouts], dtype=torch.int64),
        versions_B=torch.tensor([one.policy_version for one in rollouts], dtype=torch.int64),
        formats_B=torch.tensor([format_number(one.format) for one in rollouts], dtype=torch.int64),
        versions_N=_versions(rollouts),
        **_kept(rollouts),
        **_top(rollouts),
        experts_PLK=_experts(rollouts),
        **_sessions(rollouts),
    )


def joined(parts: Sequence[Sequence[float]], kind: str) -> Tensor:
    """The parts one after another; arrays of that kind are copied once."""
    return torch.from_numpy(
        np.concatenate([np.zeros(0, kind), *(np.asarray(part, kind) for part in parts)])
    )


def _versions(rollouts: Sequence[Rollout]) -> Tensor | None:
    if all(one.versions is None for one in rollouts):
        return None
    return joined(
        [one.versions or array("i", [one.policy_version]) * len(one.token_ids) for one in rollouts],
        "int32",
    )


def _experts(rollouts: Sequence[Rollout]) -> Tensor | None:
    reported = [one.experts_SLK for one in rollouts if one.experts_SLK is not None]
    if not reported:
        return None
    lengths = [len(one.prompt.token_ids) + len(one.token_ids) for one in rollouts]
    small = all(one.max(initial=0) < 128 for one in reported)
    shape = (sum(lengths), *reported[0].shape[1:])
    kind = torch.int8 if small else torch.int16
    chosen_PLK = torch.full(shape, NO_EXPERT, dtype=kind)
    for part, one in zip(chosen_PLK.split(lengths), rollouts, strict=True):
        if one.experts_SLK is not None:
            part[: len(one.experts_SLK)] = torch.from_numpy(one.experts_SLK.astype(np.int16))
    return chosen_PLK


def _sessions(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    if all(one.session is None for one in rollouts):
        return {}
    found = {
        "samples_B": torch.tensor([one.sample for one in rollouts]),
        "turns_N": joined(
            [one.turns or array("i", [-1]) * len(one.token_ids) for one in rollouts], "int32"
        ),
    }
    if any(one.credit is not None for one in rollouts):
        credit = [one.credit or array("f", [0.0]) * len(one.token_ids) for one in rollouts]
        found["credit_N"] = joined(credit, "float32")
    return found


def _kept(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    counts = [one.kept_counts for one in rollouts if one.kept_counts is not None]
    ids = [one.kept_ids for one in rollouts if one.kept_ids is not None]
    if not ids:
        return {}
    _check_reported(rollouts, "kept_ids", "their sampling support")
    return {"kept_counts_N": joined(counts, "int32"), "kept_ids_K": joined(ids, "int32")}


def _top(rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
    found = [one for one in rollouts if one.top_counts is not None]
    if not found:
        return {}
    _check_reported(rollouts, "top_counts", "the top logprobs of their tokens")
    return {
        "top_counts_N": joined([one.top_counts or () for one in found], "int16"),
        "top_ids_E": joined([one.top_ids or () for one in found], "int32"),
        "top_logprobs_E": joined([cast(Any, one.top_logprobs) for one in found], "float16"),
    }


def _check_reported(rollouts: Sequence[Rollout], name: str, what: str) -> None:
    """Check that every response with tokens has the column; a failed session has no tokens."""
    missing = sum(len(one.token_ids) > 0 and getattr(one, name) is None for one in rollouts)
    if missing:
        raise ValueError(f"{missing} of {len(rollouts)} responses do not report {what}")
