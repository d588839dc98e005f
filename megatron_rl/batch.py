"""Batch of a step: scored rollouts as packed tensors, padded by its `*_BT` properties; and the
dataclasses made of it: `Targets`, what an optimizer update is given, and `LossInputs`, what the
policy loss of a micro-batch is given.

Shape suffixes: B sequences, T response positions, S positions of prompt + response (both
right-padded), N response tokens of all rows, P tokens of all rows, L layers, K ids or experts. Of
what has T, column 0 is the response's first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from megatron_rl.config.schema import format_number
from megatron_rl.types import NO_EXPERT, Rollout, Scored


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Numbers of tokens in each row's prompt and response."""

    prompt_lengths_B: Tensor  # int64
    response_lengths_B: Tensor

    def __len__(self) -> int:
        return len(self.prompt_lengths_B)

    @property
    def lengths_B(self) -> Tensor:
        return self.prompt_lengths_B + self.response_lengths_B


@dataclass(frozen=True, kw_only=True)
class Sequences(Lengths):
    """Prompts and responses for a forward pass: rows of unlike lengths one after another, unpadded.

    A column's last letters give its entries per row: one value (B), one for each response token (N)
    or for each token (P), or as many ids as that row's tokens were drawn among (K).
    """

    tokens_P: Tensor  # int32: of each row, prompt and then response
    # int32: how many tokens each was drawn among, and which; None: among all
    kept_counts_N: Tensor | None = None
    kept_ids_K: Tensor | None = None
    # int8, int16: what the engine chose, -1 where not told; None: nowhere
    experts_PLK: Tensor | None = None

    @property
    def bare(self) -> Sequences:
        """The inputs of a forward pass alone."""
        parts: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Sequences)}
        return Sequences(**parts)

    def rows(self, index: Tensor) -> Self:
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        parts: dict[str, Any] = {
            one.name: self.taken(one.name, getattr(self, one.name), index) for one in fields(self)
        }
        return type(self)(**parts)

    def taken(self, name: str, column: Tensor | None, index: Tensor) -> Tensor | None:
        """The rows' part of a column, in the order of `index`."""
        if column is None or name.endswith("_B"):
            return None if column is None else column[index]
        sizes = self.sizes(name)
        taken = sizes[index]
        # where each taken row begins, in the column and in the result
        gaps = (sizes.cumsum(0) - sizes)[index] - (taken.cumsum(0) - taken)
        places = torch.repeat_interleave(gaps, taken) + torch.arange(int(taken.sum()))
        return column.index_select(0, places)

    def sizes(self, name: str) -> Tensor:
        """Entries of a column in each row."""
        if not name.endswith("_K"):
            return sizes_of(name, self.prompt_lengths_B, self.response_lengths_B)
        assert self.kept_counts_N is not None
        ends_N = torch.nn.functional.pad(self.kept_counts_N.long().cumsum(0), (1, 0))
        return ends_N[self.response_lengths_B.cumsum(0)].diff(prepend=ends_N[:1])


@dataclass(frozen=True, kw_only=True)
class Batch(Sequences):
    """Global batch of a step. Rows of a group are neighbours. Matrices with T are made lazily."""

    mask_N: Tensor  # bool: trained-on response tokens
    sampler_logprobs_N: Tensor  # float32
    rewards_B: Tensor  # float32, NaN where there is no score
    groups_B: Tensor  # int64
    versions_B: Tensor  # int64: policy version that sampled the row, its first token
    # int64: place of the sampler's weight format in schema.Format; -1: unknown
    formats_B: Tensor | None = None
    # int32: of each token, where an update came between some; None: nowhere
    versions_N: Tensor | None = None
    # int64: which of its group's sessions a row is of; None: each row is its own
    samples_B: Tensor | None = None
    # int32: the turn that a token was sampled in, -1: in none; None: all in one
    turns_N: Tensor | None = None
    credit_N: Tensor | None = None  # float32: see Rollout.credit

    @classmethod
    def of_matrices(
        cls,
        tokens_BS: Tensor,
        prompt_lengths_B: Tensor,
        response_lengths_B: Tensor,
        mask_BT: Tensor,
        sampler_logprobs_BT: Tensor,
        rewards_B: Tensor,
        groups_B: Tensor,
        versions_B: Tensor,
        **more: Tensor | None,
    ) -> Self:
        """A batch from right-padded matrices."""
        given = {"mask_BT": mask_BT, "sampler_logprobs_BT": sampler_logprobs_BT, **more}
        lengths = {"prompt_lengths_B": prompt_lengths_B, "response_lengths_B": response_lengths_B}
        of_rows = {"rewards_B": rewards_B, "groups_B": groups_B, "versions_B": versions_B}
        tokens_P = flat_of(tokens_BS, prompt_lengths_B + response_lengths_B).int()
        return cls(
            tokens_P=tokens_P, **lengths, **of_rows, **_without_padding(given, response_lengths_B)
        )

    def with_matrices(self, **matrices: Tensor | None) -> Self:
        """The batch with other values of each response token."""
        return replace(self, **_without_padding(matrices, self.response_lengths_B))

    def matrix(self, values_N: Tensor, fill: float = 0) -> Tensor:
        """Values of each response token as a matrix, right-padded with `fill`."""
        return matrix_of(values_N, self.response_lengths_B, fill)

    @property
    def tokens_BS(self) -> Tensor:
        return matrix_of(self.tokens_P, self.lengths_B).long()

    @property
    def mask_BT(self) -> Tensor:
        return self.matrix(self.mask_N)

    @property
    def sampler_logprobs_BT(self) -> Tensor:
        return self.matrix(self.sampler_logprobs_N)

    @property
    def token_versions_BT(self) -> Tensor:
        if self.versions_N is not None:
            return self.matrix(self.versions_N).long()
        return self.versions_B[:, None].expand(
            len(self), max((1, *self.response_lengths_B.tolist()))
        )

    @property
    def turns_BT(self) -> Tensor | None:
        if self.turns_N is None:
            return None
        return self.matrix(self.turns_N, -1).long()


def matrix_of(values: Tensor, lengths_B: Tensor, fill: float = 0) -> Tensor:
    """Rows that stand one after another as a matrix, right-padded; at least one column."""
    lengths = lengths_B.tolist()
    table = values.new_full((len(lengths), max((1, *lengths)), *values.shape[1:]), fill)
    for row, part in zip(table, values.split(lengths), strict=True):
        row[: len(part)] = part
    return table


def sizes_of(name: str, prompt_lengths_B: Tensor, response_lengths_B: Tensor) -> Tensor:
    """Entries of a column in each row, by the column's last letters; not for ids (_K)."""
    if name.endswith(("_N", "_BT")):
        return response_lengths_B
    if name.endswith(("_P", "_PLK")):
        return prompt_lengths_B + response_lengths_B
    return torch.ones_like(prompt_lengths_B)


def flat_of(matrix: Tensor, lengths_B: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """The rows of a right-padded matrix one after another, without its padding; or some of them,
    with their lengths.
    """
    chosen = matrix if rows is None else (matrix[row] for row in rows)
    parts = [row[:length] for row, length in zip(chosen, lengths_B.tolist(), strict=True)]
    return torch.cat([matrix.new_zeros(0, *matrix.shape[2:]), *parts])


def _without_padding(columns: Mapping[str, Tensor | None], lengths_B: Tensor) -> dict[str, Any]:
    """Columns of a batch, where some may be matrices with a value of each response token."""
    return {
        name.replace("_BT", "_N"): flat_of(one, lengths_B)
        if one is not None and name.endswith("_BT")
        else one
        for name, one in columns.items()
    }


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
        groups_B=torch.tensor([one.group for one in rollouts]),
        versions_B=torch.tensor([one.policy_version for one in rollouts]),
        formats_B=torch.tensor([format_number(one.format) for one in rollouts]),
        versions_N=_versions(rollouts),
        **_kept(rollouts),
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
    told = [one.experts_SLK for one in rollouts if one.experts_SLK is not None]
    if not told:
        return None
    lengths = [len(one.prompt.token_ids) + len(one.token_ids) for one in rollouts]
    small = all(one.max(initial=0) < 128 for one in told)
    shape = (sum(lengths), *told[0].shape[1:])
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
    if all(one.kept_ids is None for one in rollouts):
        return {}
    counts = [one.kept_counts for one in rollouts if one.kept_counts is not None]
    ids = [one.kept_ids for one in rollouts if one.kept_ids is not None]
    if len(ids) < len(rollouts):
        raise ValueError(
            f"{len(rollouts) - len(ids)} of {len(rollouts)} answers do not say what they were "
            "drawn among"
        )
    return {"kept_counts_N": joined(counts, "int32"), "kept_ids_K": joined(ids, "int32")}


@dataclass(frozen=True)
class LossInputs:
    """Everything a policy loss may look at; rows of one micro-batch."""

    logprobs_BT: Tensor  # pi, carries the gradient
    # p; mu where there was no prox pass for p; None: pi itself, a constant
    anchor_logprobs_BT: Tensor | None
    sampler_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor | None
    entropy_BT: Tensor | None
    advantages_B: Tensor
    weights_BT: Tensor
    mask_BT: Tensor
    denominator_mask_BT: Tensor
    prompt_ids_B: Tensor
    selected_BT: Tensor | None = None
    turns_BT: Tensor | None = None  # see Batch
    advantages_BT: Tensor | None = None  # of each token; None: its row's
    staleness_BT: Tensor | None = None  # see Targets


@dataclass(frozen=True)
class Targets:
    """Inputs of the loss beside the policy's own forward pass, for one global optimizer update.

    Rows match `batch`. Without an anchor, the loss completes the weights and masks.
    """

    batch: Batch
    # p; the sampler's mu where correction.anchor is not prox; None: what the update's own forward
    # pass gives
    anchor_logprobs_BT: Tensor | None
    ref_logprobs_BT: Tensor | None
    advantages_B: Tensor
    weights_BT: Tensor
    mask_BT: Tensor
    denominator_mask_BT: Tensor
    selected_BT: Tensor | None = None
    advantages_BT: Tensor | None = None  # of each token; None: its row's
    # updates since the token was sampled; for correction.anchor interpolated
    staleness_BT: Tensor | None = None

    def rows(self, index: Tensor) -> Targets:
        batch = self.batch.rows(index)
        width = max((1, *batch.response_lengths_B.tolist()))
        named = {name: value for name, value in vars(self).items() if name != "batch"}
        parts: dict[str, Any] = {
            name: value
            if value is None
            else value[index, :width]
            if value.dim() == 2
            else value[index]
            for name, value in named.items()
        }
        return Targets(batch, **parts)
