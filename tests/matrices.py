"""Examples as matrices [B, T], for tests that spell out what is at which token: their corrections
and losses. Every position is a response token, the mask says which count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.config.schema import CorrectionConfig, LossConfig
from megatron_rl.loss import policy_loss as losses
from megatron_rl.loss.policy_loss import Totals
from megatron_rl.rollout_correction import correction as flat


def lengths_of(shape_BT: torch.Size) -> Tensor:
    return torch.full((shape_BT[0],), shape_BT[1])


def batch_of(mask_BT: Tensor, sampler_BT: Tensor, **columns: Any) -> Batch:
    """Responses to one prompt of one token, by policy version 0, unless `columns` differ. Those of
    tokens may be matrices.
    """
    rows, width = mask_BT.shape
    zeros_B = torch.zeros(rows, dtype=torch.int64)
    plain = {
        "prompt_lengths_B": zeros_B + 1,
        "response_lengths_B": lengths_of(mask_BT.shape),
        "tokens_P": torch.zeros(rows * (width + 1), dtype=torch.int32),
        "rewards_B": torch.zeros(rows),
        "groups_B": zeros_B,
        "versions_B": zeros_B,
        "mask_N": mask_BT.bool(),
        "sampler_logprobs_N": sampler_BT,
    }
    found = {name.replace("_BT", "_N"): column for name, column in (plain | columns).items()}
    return Batch(
        **{
            name: column if column is None or not name.endswith("_N") else column.reshape(-1)
            for name, column in found.items()
        }
    )


@dataclass(frozen=True)
class Corrected:
    """A correction as matrices."""

    flat: flat.Correction
    prox_logprobs_BT: Tensor | None
    sampler_logprobs_BT: Tensor
    weights_BT: Tensor
    mask_BT: Tensor
    denominator_mask_BT: Tensor
    metrics: dict[str, float]
    rejected_B: Tensor


def rollout_correction(
    prox_BT: Tensor | None,
    sampler_BT: Tensor,
    mask_BT: Tensor,
    config: CorrectionConfig,
    turns_BT: Tensor | None = None,
    judge: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
) -> Corrected:
    batch = batch_of(mask_BT, sampler_BT, turns_BT=turns_BT)
    prox_N = None if prox_BT is None else prox_BT.reshape(-1)
    found = flat.rollout_correction(batch, prox_N, config, judge=judge)
    matrices = (
        one.view(mask_BT.shape) for one in (found.weights_N, found.mask_N, found.denominator_mask_N)
    )
    return Corrected(found, prox_BT, sampler_BT, *matrices, found.metrics, found.rejected_B)


@dataclass(frozen=True)
class LossInputs:
    """Everything a policy loss may look at, as matrices."""

    logprobs_BT: Tensor  # pi, carries the gradient
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
    turns_BT: Tensor | None = None
    advantages_BT: Tensor | None = None
    staleness_BT: Tensor | None = None

    def targets(self) -> UpdateInputs:
        columns = {
            one.name.replace("_BT", "_N"): column if column.dim() == 1 else column.reshape(-1)
            for one in fields(self)
            if (column := getattr(self, one.name)) is not None
        }
        for name in ("logprobs_N", "entropy_N"):
            columns.pop(name, None)
        groups_B = columns.pop("prompt_ids_B")
        absent: dict[str, Any] = {"anchor_logprobs_N": None, "ref_logprobs_N": None}
        return UpdateInputs(
            prompt_lengths_B=torch.ones_like(groups_B),
            response_lengths_B=lengths_of(self.mask_BT.shape),
            groups_B=groups_B,
            **absent | columns,
        )


def count_totals(
    denominator_mask_BT: Tensor,
    prompt_ids_B: Tensor,
    horizon: int,
    weights_BT: Tensor | None = None,
) -> Totals:
    measured = None if weights_BT is None else int((weights_BT > 0).sum())
    return losses.count_totals(denominator_mask_BT.sum(dim=1), prompt_ids_B, horizon, measured)


def policy_loss(
    inputs: LossInputs,
    config: LossConfig,
    totals: Totals | None = None,
    correction: CorrectionConfig | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Without `totals` these rows are the batch."""
    mask_BT = inputs.denominator_mask_BT
    if totals is None:
        columns = mask_BT.any(dim=0).nonzero()
        horizon = int(columns[-1]) + 1 if len(columns) else 1
        totals = count_totals(mask_BT, inputs.prompt_ids_B, horizon, inputs.weights_BT)
    entropy_N = None if inputs.entropy_BT is None else inputs.entropy_BT.reshape(-1)
    return losses.policy_loss(
        inputs.logprobs_BT.reshape(-1), inputs.targets(), config, totals, correction, entropy_N
    )


def matrix(values_N: Tensor, lengths_B: Tensor, fill: float = 0) -> Tensor:
    """Rows that stand one after another, right-padded; at least one column."""
    return torch.nn.utils.rnn.pad_sequence(
        [values_N.new_zeros(1), *values_N.split(lengths_B.tolist())],
        batch_first=True,
        padding_value=fill,
    )[1:]


def flat_of(matrix: Tensor, lengths_B: Tensor) -> Tensor:
    """The rows of a right-padded matrix one after another, without its padding."""
    parts = [row[:length] for row, length in zip(matrix, lengths_B.tolist(), strict=True)]
    return torch.cat([matrix.new_zeros(0, *matrix.shape[2:]), *parts])
