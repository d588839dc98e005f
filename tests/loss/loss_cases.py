"""What the tests of losses and corrections are given: a loss's inputs after a correction, and parts of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import CorrectionConfig, WeightConfig
from megatron_rl.types import LossInputs

LOG2 = math.log(2.0)
BYPASS = CorrectionConfig(anchor="sampler", weight=WeightConfig(level="none"), rebaseline=False, renormalize=False)


def inputs_of(pi_BT: Tensor, anchor_BT: Tensor, mu_BT: Tensor, found: Any, advantages_B: Tensor) -> LossInputs:
    """`found` holds the weights and masks, as a Correction does; all rows answer one prompt."""
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


def rows_of(inputs: LossInputs, index: slice | Tensor | list[int], width: int | None = None) -> LossInputs:
    """Some of the rows, cut to a width."""
    parts = {name: value[index] for name, value in vars(inputs).items() if value is not None}
    return replace(inputs, **{name: part[:, :width] if part.dim() == 2 else part for name, part in parts.items()})
