"""Inputs of the loss formulas of `table.py` (logprobs, weights, ...), ratios made of them;
estimates of the KL penalty.

Shape legend: B sequences, T response positions; B1 broadcasts along T.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Aggregate, Divergence, Level
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp
from megatron_rl.rollout_correction.weights import aggregated


@dataclass(frozen=True)
class Terms:
    """Inputs of one loss, 0 outside the mask."""

    logprobs_BT: Tensor  # pi, carries the gradient
    anchor_BT: Tensor
    advantages_B1: Tensor  # [B, T] where turns of a row differ
    weights_BT: Tensor
    mask_BT: Tensor
    selected_BT: Tensor | None
    turns_BT: Tensor | None = None

    @property
    def shift_BT(self) -> Tensor:
        return self.logprobs_BT - self.anchor_BT

    @property
    def ratio_BT(self) -> Tensor:
        return self.exp(self.shift_BT)

    def shared_ratio_BT(self, level: Level, aggregate: Aggregate, limit: float) -> Tensor:
        """The ratio of each token's sequence, turn or prefix; the token carries its own gradient
        and no other's.
        """
        ratio = LogRatio(
            self.shift_BT.detach(), self.mask_BT, self.mask_BT, None, 0, 0, self.turns_BT
        )
        shared_BT = ratio.at_tokens(level, aggregated(level, aggregate, ratio))
        return (shared_BT + self.logprobs_BT - self.logprobs_BT.detach()).clamp(max=limit).exp()

    @staticmethod
    def exp(exponent: Tensor) -> Tensor:
        return bounded_exp(exponent)

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next number."""
        return torch.finfo(self.logprobs_BT.dtype).eps

    def row_mean(self, values_BT: Tensor) -> Tensor:
        counts_B1 = self.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return values_BT.masked_fill(~self.mask_BT, 0.0).sum(dim=1, keepdim=True) / counts_B1


def divergence(estimator: Divergence, logprobs_BT: Tensor, ref_BT: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token."""
    shift_BT = logprobs_BT - ref_BT
    if estimator == Divergence.k1:
        return shift_BT
    if estimator == Divergence.abs:
        return shift_BT.abs()
    if estimator == Divergence.k2:
        return 0.5 * shift_BT.square()
    if estimator == Divergence.k3:
        return (-shift_BT).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1() + shift_BT
    raise ValueError(f"loss.kl_estimator is {estimator!r}; one of {', '.join(Divergence)}")
