"""Importance weights from log-ratios: level, bounds, the cap that meets a target ESS.

Shape legend: N response tokens. d = p - mu.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.batch import Replicas
from megatron_rl.config.schema import Aggregate, Level, Outside, WeightConfig
from megatron_rl.rollout_correction.ratio import SHARED_LEVELS, LogRatio, bounded_exp

SEARCH_STEPS = 40


def raw_ratio(config: WeightConfig, ratio: LogRatio) -> Tensor:
    """The unbounded ratio per token, prefix, row or turn."""
    if config.level in (Level.none, Level.token):
        return ratio.rho_N
    return bounded_exp(aggregated(config.level, config.aggregate, ratio))


def aggregated(level: Level, aggregate: Aggregate, ratio: LogRatio) -> Tensor:
    """The log of the ratio of each sequence, turn or prefix."""
    if aggregate == Aggregate.geometric:
        return ratio.means(level)
    return ratio.totals(level)


def units(config: WeightConfig, ratio: LogRatio, kept_float_N: Tensor) -> Tensor:
    """1 per kept token, segment, turn or row: the units that bounds act on."""
    if config.level in SHARED_LEVELS:
        return (ratio.sums(config.level, kept_float_N) > 0).float()
    return kept_float_N


Cap = float | Tensor | None  # a tensor: each token's own


def cap_of(config: WeightConfig, ratio: LogRatio, high: float | None) -> Cap:
    """The cap of each token by its confidence (arXiv 2609.32444), or `high` for all."""
    if config.cap.confidence is None:
        return high
    return 1.0 + config.cap.confidence * (1.0 - ratio.prob_N).clamp(min=config.cap.floor)


def bound(config: WeightConfig, raw: Tensor, cap: Cap) -> Tensor:
    if config.level == Level.none:
        return torch.ones_like(raw)
    if config.low is None and cap is None:
        return raw
    if config.outside == Outside.truncate:
        if isinstance(cap, Tensor):
            return (
                raw.minimum(cap) if config.low is None else raw.minimum(cap).clamp(min=config.low)
            )
        return raw.clamp(min=config.low, max=cap)
    inside = torch.ones_like(raw, dtype=torch.bool)
    if config.low is not None:
        inside &= raw >= config.low
    if cap is not None:
        inside &= raw <= cap
    return raw * inside


def fraction_bounds(config: WeightConfig, cap: Cap) -> tuple[float | Tensor, float | Tensor]:
    """Bounds that the fraction metrics count against: where no low is set, the mirror of high."""
    if cap is None:
        return config.low or 0.0, math.inf
    if config.low is None:
        return 1.0 / cap, cap
    return config.low, cap


@dataclass(frozen=True)
class Weighted:
    """Raw ratios of some rows with the number of kept tokens that each stands for."""

    raw: Tensor
    tokens: Tensor
    fixed_ones: int  # kept tokens whose weight is 1 at any cap


def effective_sample_size(
    parts: Sequence[Weighted],
    config: WeightConfig,
    cap: float | None,
    kept: float,
    replicas: Replicas,
) -> float:
    """(sum w)^2 / (n sum w^2) over the kept tokens of all replicas."""
    found = torch.zeros(2, dtype=torch.float64)
    for part in parts:
        weights = bound(config, part.raw, cap).double()
        weighted = weights * part.tokens
        found += torch.stack((weighted.sum(), torch.dot(weighted, weights))) + part.fixed_ones
    total, square = replicas.sum(found).tolist()
    if square > 0:
        return total * total / (kept * square)
    return 0.0


def solve_cap(
    parts: Sequence[Weighted], config: WeightConfig, kept: float, replicas: Replicas
) -> float:
    """The largest cap in [1, high] whose weights reach the target effective sample size.

    With truncation the sample size only falls as the cap rises, so halving the interval finds it.
    The ceiling is returned where it is good enough, the floor of 1 where nothing is. `kept`: of all
    replicas.
    """
    target = config.target_ess
    assert target is not None
    highest = max((float(part.raw.max()) for part in parts if part.raw.numel()), default=1.0)
    highest = float(replicas.largest(torch.tensor([highest], dtype=torch.float64)))
    ceiling = max(1.0, highest if config.high is None else config.high)
    if kept == 0 or effective_sample_size(parts, config, ceiling, kept, replicas) >= target:
        return ceiling
    low = 0.0
    high = math.log(min(ceiling, max(highest, 1.0)))
    for _ in range(SEARCH_STEPS):
        middle = 0.5 * (low + high)
        if effective_sample_size(parts, config, math.exp(middle), kept, replicas) >= target:
            low = middle
        else:
            high = middle
    return math.exp(low)
