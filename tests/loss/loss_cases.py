"""Inputs of the tests of losses and corrections: a loss's inputs after a correction, and parts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from matrices import Corrected, LossInputs, rollout_correction
from torch import Tensor

from megatron_rl.config.schema import CorrectionConfig, WeightConfig

LOG2 = math.log(2.0)
BYPASS = CorrectionConfig(
    anchor="sampler", weight=WeightConfig(level="none"), rebaseline=False, renormalize=False
)


def inputs_of(
    pi_BT: Tensor, anchor_BT: Tensor, mu_BT: Tensor, found: Any, advantages_B: Tensor
) -> LossInputs:
    """`found` holds the weights and masks, as a Correction does; all rows are responses to one prompt."""
    return LossInputs(
        logprobs_BT=pi_BT,
        anchor_logprobs_BT=anchor_BT,
        sampler_logprobs_BT=mu_BT,
        ref_logprobs_BT=None,
        entropy_BT=None,
        advantages_B=advantages_B,
        weights_BT=found.weights_BT,
        mask_BT=found.mask_BT,
        denominator_mask_BT=found.denominator_mask_BT,
        prompt_ids_B=torch.zeros(len(pi_BT), dtype=torch.int64),
    )


def corrected(
    d: list[list[float]], mask: list[list[int]] | None = None, **config: Any
) -> Corrected:
    """The correction for given log-ratios."""
    d_BT = torch.tensor(d)
    mask_BT = torch.ones_like(d_BT) if mask is None else torch.tensor(mask)
    mu_BT = torch.full_like(d_BT, -2.0)
    return rollout_correction(mu_BT + d_BT, mu_BT, mask_BT.bool(), CorrectionConfig(**config))


def inputs_for(correction: Corrected, advantages: list[float], **changes: Tensor) -> LossInputs:
    """A loss's inputs where the policy is the one that the correction was made with."""
    prox_BT = correction.prox_logprobs_BT
    mu_BT = correction.sampler_logprobs_BT
    assert prox_BT is not None
    found = inputs_of(
        prox_BT.clone().requires_grad_(), prox_BT, mu_BT, correction, torch.tensor(advantages)
    )
    return replace(found, **{"selected_BT": torch.zeros_like(correction.mask_BT)} | changes)


def rows_of(
    inputs: LossInputs, index: slice | Tensor | list[int], width: int | None = None
) -> LossInputs:
    """Some of the rows, cut to a width."""
    parts = {name: value[index] for name, value in vars(inputs).items() if value is not None}
    return replace(
        inputs,
        **{name: part[:, :width] if part.dim() == 2 else part for name, part in parts.items()},
    )
