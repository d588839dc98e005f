"""Surrogate gain of an update on a batch: mean of A (new / old - 1) over tokens, and its standard error over rows.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT


@dataclass(frozen=True)
class Gain:
    mean: float
    stderr: float  # tokens of a row are not independent


@torch.no_grad()
def gain(new_logprobs_BT: Tensor, old_logprobs_BT: Tensor, advantages_BT: Tensor, mask_BT: Tensor) -> Gain:
    """`advantages_BT`: of each token, or [B, 1]; times a weight where one was applied. Without a token all is 0."""
    d_BT = new_logprobs_BT.double() - old_logprobs_BT.double()
    counted_BT = mask_BT & torch.isfinite(d_BT)
    change_BT = d_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1()
    values_BT = torch.where(counted_BT, advantages_BT * change_BT, 0.0)
    count_B = counted_BT.sum(dim=1)
    rows, tokens = int((count_B > 0).sum()), int(count_B.sum())
    if not tokens:
        return Gain(0.0, 0.0)
    mean = float(values_BT.sum()) / tokens
    around = float((values_BT.sum(dim=1) - mean * count_B).square().sum())
    return Gain(mean, math.sqrt(around * rows / max(1, rows - 1)) / tokens)
