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
    sampler_BT: Tensor | None = None  # mu, as it was reported

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

    @property
    def weight_lost_BT(self) -> Tensor:
        """anchor / sampler, over the weight that a cap has left of it; 1 where nothing was taken
        away.
        """
        assert self.sampler_BT is not None
        raw_BT = bounded_exp((self.anchor_BT - self.sampler_BT).nan_to_num(0.0))
        return (raw_BT / self.weights_BT.where(self.weights_BT > 0, raw_BT)).clamp(min=1.0)

    @property
    def places_BT(self) -> Tensor:
        """1 for the row's first token, 2 for its second: tokens that are not trained on have no
        place of their own.
        """
        return self.mask_BT.cumsum(dim=1).clamp(min=1)

    @staticmethod
    def exp(exponent: Tensor) -> Tensor:
        return bounded_exp(exponent)

    @property
    def rounding(self) -> float:
        """The distance from 1 to the next number."""
        return torch.finfo(self.logprobs_BT.dtype).eps

    def before(self, values_BT: Tensor) -> Tensor:
        """What the row's tokens before each one add up to."""
        return values_BT.cumsum(dim=1) - values_BT

    def row_quantile(self, values_BT: Tensor, share: float) -> Tensor:
        """[B, 1], of the tokens under the mask; 0 where there is none."""
        nan = torch.full((), torch.nan, dtype=values_BT.dtype, device=values_BT.device)
        return (
            values_BT.where(self.mask_BT, nan)
            .nanquantile(share, dim=1, keepdim=True)
            .nan_to_num(0.0)
        )

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
