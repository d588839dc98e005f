"""Surrogate gain of an update on a batch: mean of A (new / old - 1) over tokens, and its standard error over rows.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT


@torch.no_grad()
def gain(new_BT: Tensor, old_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> tuple[float, float]:
    """From logprobs before and after; `advantages_BT`: of each token, or [B, 1], times a weight where there is one."""
    d_BT = new_BT.double() - old_BT.double()
    counted_BT = mask_BT & torch.isfinite(d_BT)
    values_BT = torch.where(counted_BT, advantages_BT * d_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1(), 0.0)
    count_B = counted_BT.sum(dim=1)
    rows, tokens = int((count_B > 0).sum()), max(1, int(count_B.sum()))
    mean = float(values_BT.sum()) / tokens
    around = float((values_BT.sum(dim=1) - mean * count_B).square().sum())  # tokens of a row are not independent
    return mean, math.sqrt(around * rows / max(1, rows - 1)) / tokens
