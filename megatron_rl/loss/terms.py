"""Inputs of the loss formulas of `table.py` (logprobs, weights, ...), ratios made of them;
estimates of the KL penalty.

Shape legend: N response tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Aggregate, Divergence, Level
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp
from megatron_rl.rollout_correction.weights import aggregated
from megatron_rl.segments import Segments


@dataclass(frozen=True)
class Terms:
    """Inputs of one loss, 0 outside the mask."""

    logprobs_N: Tensor  # pi, carries the gradient
    anchor_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    mask_N: Tensor
    selected_N: Tensor | None
    rows: Segments
    turns: Segments | None = None

    @property
    def shift_N(self) -> Tensor:
        return self.logprobs_N - self.anchor_N

    @property
    def ratio_N(self) -> Tensor:
        return self.exp(self.shift_N)

    def shared_ratio_N(self, level: Level, aggregate: Aggregate, limit: float) -> Tensor:
        """The ratio of each token's sequence, turn or prefix; the token carries its own gradient
        and no other's.
        """
        ratio = LogRatio(self.shift_N.detach(), self.mask_N, self.mask_N, self.rows, self.turns)
        shared_N = ratio.at_tokens(level, aggregated(level, aggregate, ratio))
        return (shared_N + self.logprobs_N - self.logprobs_N.detach()).clamp(max=limit).exp()

    @staticmethod
    def exp(exponent: Tensor) -> Tensor:
        return bounded_exp(exponent)

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next number."""
        return torch.finfo(self.logprobs_N.dtype).eps

    def row_sum(self, values_N: Tensor) -> Tensor:
        """At each token the sum over the mask of its row, a constant."""
        values_N = values_N.detach().masked_fill(~self.mask_N, 0.0)
        return self.rows.at_tokens(self.rows.sum(values_N))

    def row_mean(self, values_N: Tensor) -> Tensor:
        """At each token the mean over the mask of its row, a constant."""
        return self.row_sum(values_N) / self.row_sum(torch.ones_like(values_N)).clamp(min=1)


def divergence(estimator: Divergence, logprobs_N: Tensor, ref_N: Tensor) -> Tensor:
    """Estimates of KL(pi || ref) per token."""
    shift_N = logprobs_N - ref_N
    if estimator == Divergence.k1:
        return shift_N
    if estimator == Divergence.abs:
        return shift_N.abs()
    if estimator == Divergence.k2:
        return 0.5 * shift_N.square()
    return (-shift_N).clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1() + shift_N
