"""Importance weights from log-ratios: level, bounds, the cap or mix that meets a target effective
sample size; `step_scale`: what the learning rate of an update is multiplied by for that size.

Shape legend: B sequences, T response positions. d = p - mu.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Aggregate, Level, Outside, TargetBy, WeightConfig
from megatron_rl.rollout_correction.ratio import LogRatio, bounded_exp

SEARCH_STEPS = 40


def raw_ratio(config: WeightConfig, ratio: LogRatio) -> Tensor:
    """The ratio before any bound: [B, T] per token and prefix, [B, 1] per sequence, one column for
    each turn.
    """
    if config.level in (Level.none, Level.token):
        return ratio.rho_BT
    return bounded_exp(aggregated(config.level, config.aggregate, ratio))


def aggregated(level: Level, aggregate: Aggregate, ratio: LogRatio) -> Tensor:
    """The log of the ratio of each sequence, turn or prefix."""
    if aggregate == Aggregate.min:
        return ratio.d_BT + _smallest_before(ratio)
    if aggregate == Aggregate.geometric:
        return ratio.means(level)
    return ratio.totals(level)


def _smallest_before(ratio: LogRatio) -> Tensor:
    """The smallest d among the row's tokens before each one, 0 before the first."""
    smallest_BT = ratio.extremes(Level.prefix, ratio.d_BT, largest=False)
    before_BT = torch.zeros_like(smallest_BT)
    before_BT[:, 1:] = smallest_BT[:, :-1]
    return before_BT.masked_fill_(before_BT.isinf(), 0.0)


def units(config: WeightConfig, ratio: LogRatio, kept_float_BT: Tensor) -> Tensor:
    """1 for each token, turn or row that is kept, in the shape of its raw ratio: what the bounds
    act on.
    """
    if config.level == Level.turn and torch.equal(kept_float_BT, ratio.counted_float_BT):
        return (ratio.counts_BK > 0).float()
    if config.level in (Level.sequence, Level.turn):
        return (ratio.sums(config.level, kept_float_BT) > 0).float()
    return kept_float_BT


def bound(config: WeightConfig, raw: Tensor, cap: float | None) -> Tensor:
    if config.level == Level.none:
        return torch.ones_like(raw)
    if config.low is None and cap is None:
        return raw
    if config.outside == Outside.truncate:
        return raw.clamp(min=config.low, max=cap)
    inside = torch.ones_like(raw, dtype=torch.bool)
    if config.low is not None:
        inside &= raw >= config.low
    if cap is not None:
        inside &= raw <= cap
    return raw * inside


def in_force(config: WeightConfig, raw: Tensor, solved: float | None) -> Tensor:
    """The weights of raw ratios, under what was solved for the target: a cap, or the share of w - 1
    that is left.
    """
    if config.target_by == TargetBy.cap:
        return bound(config, raw, solved)
    weights = bound(config, raw, config.high)
    if solved is None:
        return weights
    return (weights - 1.0).mul_(solved).add_(1.0)


def fraction_bounds(config: WeightConfig, solved: float | None) -> tuple[float, float]:
    """Bounds that the fraction metrics count against: where no low is set, the mirror of high."""
    cap = solved if config.target_by == TargetBy.cap else config.high
    high = math.inf if cap is None else cap
    low = config.low if config.low is not None else (0.0 if cap is None else 1.0 / cap)
    return low, high


@dataclass(frozen=True)
class Weighted:
    """Raw ratios of some rows with the number of kept tokens that each stands for."""

    raw: Tensor
    tokens: Tensor
    fixed_ones: int  # kept tokens whose weight is 1 whatever the cap


def _sums(
    parts: Sequence[Weighted], config: WeightConfig, cap: float | None
) -> tuple[float, float]:
    """Of the weights of all kept tokens, and of their squares."""
    total = float(sum(part.fixed_ones for part in parts))
    square = total
    for part in parts:
        weights = bound(config, part.raw, cap)
        weighted = weights * part.tokens
        total += float(weighted.sum())
        square += float(torch.dot(weighted.flatten(), weights.flatten()))
    return total, square


def effective_sample_size(
    parts: Sequence[Weighted], config: WeightConfig, cap: float | None, kept: int
) -> float:
    """(sum w)^2 / (n sum w^2) over kept tokens."""
    total, square = _sums(parts, config, cap)
    if square > 0:
        return total * total / (kept * square)
    return 0.0


def solve_mix(parts: Sequence[Weighted], config: WeightConfig, kept: int) -> float:
    """The largest a in [0, 1] whose weights 1 + a (w - 1) reach the target effective sample size; 0
    where none does.
    """
    weighed = sum(part.fixed_ones + int(part.tokens.sum()) for part in parts)
    if not weighed:
        return 1.0
    assert config.target_ess is not None
    total, square = _sums(parts, config, config.high)
    # tokens whose weight is 0 whatever a count in the size and do not mix
    return mix_share(total / weighed, square / weighed, config.target_ess * kept / weighed)


def mix_share(mean: float, square: float, target: float) -> float:
    """The size of 1 + a (w - 1) is 1 / (1 + v^2), v the deviation over the mean, which grows with
    a.
    """
    deviation = math.sqrt(max(0.0, square - mean * mean))
    allowed = math.sqrt(max(0.0, 1.0 / target - 1.0))
    # deviation a <= allowed (1 + (mean - 1) a)
    slope = deviation - allowed * (mean - 1.0)
    if slope > 0:
        return min(1.0, allowed / slope)
    return 1.0


def solve_cap(parts: Sequence[Weighted], config: WeightConfig, kept: int) -> float:
    """The largest cap in [1, high] whose weights reach the target effective sample size.

    With truncation the sample size only falls as the cap rises, so halving the interval finds it.
    The ceiling is returned where it is good enough, the floor of 1 where nothing is.
    """
    target = config.target_ess
    assert target is not None
    highest = max((float(part.raw.max()) for part in parts if part.raw.numel()), default=1.0)
    ceiling = max(1.0, highest if config.high is None else config.high)
    if kept == 0 or effective_sample_size(parts, config, ceiling, kept) >= target:
        return ceiling
    low = 0.0
    high = math.log(min(ceiling, max(highest, 1.0)))
    for _ in range(SEARCH_STEPS):
        middle = 0.5 * (low + high)
        if effective_sample_size(parts, config, math.exp(middle), kept) >= target:
            low = middle
        else:
            high = middle
    return math.exp(low)


def step_scale(weights_BT: Tensor, mask_BT: Tensor, power: float) -> float:
    """The effective sample size of a minibatch's weights, as a share of its tokens, to a power."""
    if not power:
        return 1.0
    weights = weights_BT[mask_BT].double()
    square = float(weights.square().sum()) * len(weights)
    if square > 0:
        return (float(weights.sum()) ** 2 / square) ** power
    return 1.0
