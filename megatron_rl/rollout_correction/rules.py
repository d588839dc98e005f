"""Reject rules: a statistic of log-ratios per token, prefix, turn or row; bounds; budget cutoff.

Shape legend: B sequences, T response positions. All rules see the same mask, so their order is
irrelevant. d = p - mu, and rho = exp(d) is always learner over sampler.
"""

import math

import torch
from torch import Tensor

from megatron_rl.config.schema import Level, Reduce, RejectRule, Stat
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp


def token_stat(stat: Stat, ratio: LogRatio) -> Tensor:
    """k1, k2 and k3 estimate KL(mu || p); `abs` is the multiplicative error of the probability."""
    d_BT = ratio.d_BT
    if stat == Stat.ratio:
        return bounded_exp(d_BT)
    if stat == Stat.k1:
        return -d_BT
    if stat == Stat.k2:
        return d_BT.square().mul_(0.5)
    if stat == Stat.k3:
        return d_BT.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1_().sub_(d_BT)
    if stat == Stat.m2:
        return d_BT.square()
    if stat == Stat.abs:
        return bounded_exp(d_BT.abs())
    if stat in (Stat.tv, Stat.binary_kl, Stat.binary_kl_max):
        return _coin_stat(stat, ratio)
    if stat == Stat.staleness:
        return d_BT  # `without_stale` hands ages over in place of differences
    raise ValueError(f"unknown stat {stat!r}: one of {', '.join(Stat)}")


def _coin_stat(stat: Stat, ratio: LogRatio) -> Tensor:
    """TV or KL of the Bernoulli variable "token or not": a lower bound of the distributions'."""
    if stat == Stat.tv:
        return (ratio.prob_BT - ratio.sampler_prob_BT).abs_()
    # heads for sure would make the other face's ratio 0 / 0
    most = 1.0 - torch.finfo(torch.float32).eps
    p_BT = ratio.prob_BT.clamp(max=most)
    mu_BT = ratio.sampler_prob_BT.clamp(max=most)
    to_prox_BT = _coin_kl(mu_BT, p_BT, ratio.d_BT).neg_()
    if stat == Stat.binary_kl:
        return to_prox_BT
    return to_prox_BT.maximum(_coin_kl(p_BT, mu_BT, -ratio.d_BT).neg_())


def _coin_kl(p_BT: Tensor, q_BT: Tensor, d_BT: Tensor) -> Tensor:
    """Minus KL of coins whose heads are p and q, with d = log q - log p."""
    tails_BT = (p_BT - q_BT).div_(1.0 - p_BT).log1p_()
    return tails_BT.lerp_(d_BT, p_BT)


def reduced_stat(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """The statistic per row, turn or prefix, shaped as `ratio.sums`; undefined without tokens."""
    # for the ratio it is d that is summed or averaged: the product, or the geometric mean
    if rule.stat == Stat.ratio and rule.reduce in (Reduce.sum, Reduce.mean):
        return bounded_exp(
            ratio.totals(rule.level) if rule.reduce == Reduce.sum else ratio.means(rule.level)
        )
    if rule.reduce in (Reduce.sum, Reduce.mean):
        total = ratio.sums(rule.level, token_stat(rule.stat, ratio) * ratio.counted_float_BT)
        if rule.reduce == Reduce.sum:
            return total
        return total / ratio.counts(rule.level).clamp(min=1.0)
    if rule.reduce in (Reduce.max, Reduce.min):
        return ratio.extremes(rule.level, token_stat(rule.stat, ratio), rule.reduce == Reduce.max)
    raise ValueError(
        f"a {rule.level} rule needs reduce, one of {', '.join(Reduce)}; it is {rule.reduce!r}"
    )


def stat_of(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """[B, T] for rules on tokens and prefixes, [B, 1] for sequences, [B, K] for turns."""
    if rule.level == Level.token:
        return token_stat(rule.stat, ratio)
    return reduced_stat(rule, ratio)


def judged(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """Mask of the places where a rule's statistic exists, in its shape."""
    if rule.level in (Level.token, Level.prefix):
        return ratio.counted_BT
    return ratio.counts(rule.level) > 0


def violations(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """Mask of what a rule with bounds rejects, in a shape that broadcasts to [B, T]."""
    if rule.level == Level.none:
        raise ValueError("level of a reject rule: token, sequence, turn or prefix, not none")
    if rule.budget is not None:
        raise ValueError(
            "a reject rule with a budget looks at all tokens of the batch; leave out when"
        )
    stat = stat_of(rule, ratio)
    # written as "not inside", so that a statistic that overflowed to NaN is rejected
    inside = torch.ones_like(stat, dtype=torch.bool)
    if rule.low is not None:
        inside &= stat >= rule.low
    if rule.high is not None:
        inside &= stat <= rule.high
    return ratio.at_tokens(rule.level, ~inside & judged(rule, ratio))


def budget_cutoff(values: Tensor, budget: float) -> float:
    """The smallest excluded value: those below it average at most `budget`; infinite if all do.

    Equal values are kept or excluded together: the result does not depend on the order of rows.
    """
    ascending = values.flatten().sort().values
    running_mean = ascending.double().cumsum(0) / torch.arange(
        1, len(ascending) + 1, device=values.device
    )
    survivors = int((running_mean <= budget).sum())
    if survivors == len(ascending):
        return math.inf
    return float(ascending[survivors])
