"""Reject rules: a statistic of log-ratios per token, prefix, segment, turn or row; bounds; budget cutoff.

Shape legend: N response tokens. All rules see the same mask, so their order is irrelevant.
d = p - mu, and rho = exp(d) is always learner over sampler.
"""

import math

import numpy as np
import torch
from torch import Tensor

from megatron_rl.batch import Replicas
from megatron_rl.config.schema import TOP_STATS, Level, Reduce, RejectRule, Stat
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT, LogRatio, bounded_exp
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs


def token_stat(stat: Stat, ratio: LogRatio) -> Tensor:
    """k1, k2 and k3 estimate KL(mu || p); `abs` is the multiplicative error of the probability."""
    d_N = ratio.d_N
    if stat == Stat.ratio:
        return bounded_exp(d_N)
    if stat == Stat.k1:
        return -d_N
    if stat == Stat.k2:
        return d_N.square().mul_(0.5)
    if stat == Stat.k3:
        return d_N.clamp(-EXPONENT_LIMIT, EXPONENT_LIMIT).expm1_().sub_(d_N)
    if stat == Stat.m2:
        return d_N.square()
    if stat == Stat.abs:
        return bounded_exp(d_N.abs())
    if stat == Stat.staleness:
        return d_N  # `without_stale` hands ages over in place of differences
    if stat in TOP_STATS:
        assert ratio.top is not None
        return _top_stat(stat, ratio.top).to(d_N.dtype)
    return _coin_stat(stat, ratio)


def _top_stat(stat: Stat, top: TopLogprobs) -> Tensor:
    """Divergence of the two distributions over top tokens and tail; 0 where they are not known."""
    if stat == Stat.top_tv:
        return top.total_variation_N
    return top.kl_N if stat == Stat.top_kl else top.reverse_kl_N


def _coin_stat(stat: Stat, ratio: LogRatio) -> Tensor:
    """TV or KL of the Bernoulli variable "token or not": a lower bound of the distributions'."""
    if stat == Stat.tv:
        return (ratio.prob_N - ratio.sampler_prob_N).abs_()
    # heads for sure would make the other face's ratio 0 / 0
    most = 1.0 - torch.finfo(torch.float32).eps
    p_N = ratio.prob_N.clamp(max=most)
    mu_N = ratio.sampler_prob_N.clamp(max=most)
    to_prox_N = _coin_kl(mu_N, p_N, ratio.d_N).neg_()
    if stat == Stat.binary_kl:
        return to_prox_N
    return to_prox_N.maximum(_coin_kl(p_N, mu_N, -ratio.d_N).neg_())


def _coin_kl(p_N: Tensor, q_N: Tensor, d_N: Tensor) -> Tensor:
    """Minus KL of coins whose heads are p and q, with d = log q - log p."""
    tails_N = (p_N - q_N).div_(1.0 - p_N).log1p_()
    return tails_N.lerp_(d_N, p_N)


def reduced_stat(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """The statistic per row, turn or prefix; undefined without tokens."""
    if rule.reduce in (Reduce.max, Reduce.min):
        return ratio.extremes(rule.level, token_stat(rule.stat, ratio), rule.reduce == Reduce.max)
    # for the ratio it is d that is summed or averaged: the product, or the geometric mean
    if rule.stat == Stat.ratio:
        total = ratio.totals(rule.level)
    else:
        total = ratio.sums(rule.level, token_stat(rule.stat, ratio) * ratio.counted_float_N)
    if rule.reduce == Reduce.mean:
        total = total / ratio.counts(rule.level).clamp(min=1.0)
    return bounded_exp(total) if rule.stat == Stat.ratio else total


def stat_of(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """The statistic of each token, row, turn or prefix, as the rule's level has it."""
    if rule.level == Level.token:
        return token_stat(rule.stat, ratio)
    return reduced_stat(rule, ratio)


def judged(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """Mask of the places where a rule's statistic exists, in its shape."""
    if rule.level in (Level.token, Level.prefix):
        return ratio.counted_N
    return ratio.counts(rule.level) > 0


def violations(rule: RejectRule, ratio: LogRatio) -> Tensor:
    """bool [N]: tokens that a rule with bounds rejects."""
    outside = is_outside(rule, stat_of(rule, ratio))
    return ratio.at_tokens(rule.level, outside & judged(rule, ratio))


def is_outside(rule: RejectRule, stat: Tensor) -> Tensor:
    """Mask of the values that a rule's bounds reject."""
    # written as "not inside", so that a statistic that overflowed to NaN is rejected
    inside = torch.ones_like(stat, dtype=torch.bool)
    if rule.low is not None:
        inside &= stat >= rule.low
    if rule.high is not None:
        inside &= stat <= rule.high
    return ~inside


def budget_cutoff(values: Tensor, budget: float, replicas: Replicas) -> float:
    """The smallest excluded value: those below it average at most `budget`; infinite if all do.

    Equal values are kept or excluded together: the result does not depend on the order of rows.
    `values`: this replica's, float32.
    """
    keys = _ordered(values).sort().values
    totals = torch.nn.functional.pad(_value(keys).double().cumsum(0), (1, 0))

    def exceeds(key: int) -> bool:
        """True if the mean of the values up to this one exceeds the budget."""
        count = torch.searchsorted(keys, key, right=True)
        total, n = replicas.sum(torch.stack((totals[count], count.double()))).tolist()
        return n > 0 and not total / n <= budget

    low = -(1 << 31)
    high = (1 << 31) - 1
    if not exceeds(high):
        return math.inf
    while low < high:
        middle = (low + high) // 2
        if exceeds(middle):
            high = middle
        else:
            low = middle + 1
    return float(_value(torch.tensor([high], dtype=torch.int32)))


def next_below(cutoff: float) -> float | None:
    """The largest float32 value below a cutoff; None: there is none to cut."""
    if cutoff == math.inf:
        return None
    return float(np.nextafter(np.float32(cutoff), np.float32(-math.inf)))


def _ordered(values: Tensor) -> Tensor:
    """int32 numbers in the order of these float32 values."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _value(keys: Tensor) -> Tensor:
    """The float32 values of `_ordered` numbers."""
    return torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys).view(torch.float32)
