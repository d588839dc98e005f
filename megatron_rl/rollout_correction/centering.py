"""Weights of score centering: what weights and rules give to each top token, and to the tail, had it
been sampled (arXiv 2609.20807).

A weight or rule that tokens share in a row or turn is the sampled row's. One of level prefix sees
the tokens before, and the top token in place of the sampled one.

Shape legend: N response tokens, E top tokens at all tokens, V top tokens, then tails: E + N.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.config.schema import (
    TOP_STATS,
    Aggregate,
    CorrectionConfig,
    Level,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)
from megatron_rl.rollout_correction.ratio import LogRatio, bounded_exp
from megatron_rl.rollout_correction.rules import (
    is_outside,
    stat_of,
    token_stat,
    violations,
)
from megatron_rl.rollout_correction.top_logprobs import TopLogprobs
from megatron_rl.rollout_correction.weights import bound, cap_of, raw_ratio
from megatron_rl.segments import Segments

OWN_LEVELS = (Level.token, Level.prefix)  # of which each top token has its own weight


@torch.no_grad()
def center_weights(
    ratio: LogRatio,
    top: TopLogprobs,
    config: CorrectionConfig,
    rules: Sequence[RejectRule],
    cap: float | None,
    advantages_B: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weights of top tokens and tails, [E] and [N]; 0 at tokens without a centering term.

    `rules`: with bounds alone, budgets solved. `advantages_B`: read by rules with `when`.
    """
    others = _in_place_of_sampled(top)
    centered_N = ratio.counted_N & top.usable_N
    if ratio.one_N is not None:
        centered_N = centered_N & ~ratio.one_N
    inside_V = torch.ones_like(others.counted_N)
    wrong_N = ratio.rows.at_tokens(advantages_B < 0)
    for rule in rules:
        if rule.stat == Stat.staleness:
            continue
        judged_N = centered_N if rule.when is None else centered_N & wrong_N
        if rule.level in OWN_LEVELS:
            stat_V = _stat(rule, ratio, others, top)
            inside_V &= ~(is_outside(rule, stat_V) & top.at_all(judged_N))
        else:
            centered_N = centered_N & ~(violations(rule, ratio) & judged_N)
    weights_V = _bounded(config.weight, ratio, others, top, cap)
    return top.split(weights_V.masked_fill(~(inside_V & top.at_all(centered_N)), 0.0))


def _in_place_of_sampled(top: TopLogprobs) -> LogRatio:
    """Log-ratios of the top tokens and tails, as if each was a response token."""
    d_V = top.learner_V - top.sampler_V
    every_V = torch.ones_like(d_V, dtype=torch.bool)
    row = Segments.rows(torch.full((1,), len(d_V), device=d_V.device), len(d_V))
    return LogRatio(d_V, every_V, every_V, row, prox_logprobs_N=top.learner_V)


def _bounded(
    weight: WeightConfig,
    ratio: LogRatio,
    others: LogRatio,
    top: TopLogprobs,
    cap: float | None,
) -> Tensor:
    if weight.level not in OWN_LEVELS:
        shared = bound(weight, raw_ratio(weight, ratio), cap)
        return top.at_all(ratio.at_tokens(weight.level, shared)).to(others.d_N.dtype)
    if weight.level == Level.token:
        return bound(weight, others.rho_N, cap_of(weight, others, cap))
    mean = weight.aggregate == Aggregate.geometric
    total_V = _with_prefix(ratio, top, ratio.d_N, others.d_N, mean)
    return bound(weight, bounded_exp(total_V), cap)


def _stat(rule: RejectRule, ratio: LogRatio, others: LogRatio, top: TopLogprobs) -> Tensor:
    """The statistic of a rule of level token or prefix with each top token in place of the
    sampled one.
    """
    of_ratio = rule.stat == Stat.ratio and rule.reduce in (Reduce.sum, Reduce.mean)
    if rule.stat in TOP_STATS:  # of the prefix, whichever token is sampled
        return top.at_all(stat_of(rule, ratio))
    if rule.level == Level.token:
        return token_stat(rule.stat, others)
    if of_ratio:
        total_V = _with_prefix(ratio, top, ratio.d_N, others.d_N, rule.reduce == Reduce.mean)
        return bounded_exp(total_V)
    values_N = token_stat(rule.stat, ratio)
    values_V = token_stat(rule.stat, others)
    if rule.reduce in (Reduce.sum, Reduce.mean):
        return _with_prefix(ratio, top, values_N, values_V, rule.reduce == Reduce.mean)
    largest = rule.reduce == Reduce.max
    running_N = ratio.extremes(Level.prefix, values_N, largest)
    before_N = running_N.roll(1).masked_fill(
        ratio.rows.place_N == 0, -torch.inf if largest else torch.inf
    )
    pick = torch.maximum if largest else torch.minimum
    return pick(top.at_all(before_N).to(values_V.dtype), values_V)


def _with_prefix(
    ratio: LogRatio, top: TopLogprobs, values_N: Tensor, values_V: Tensor, mean: bool
) -> Tensor:
    """Sum or mean of the values of the prefix's tokens and of each top token's own."""
    counted_N = ratio.counted_float_N
    own_N = values_N * counted_N
    before_N = ratio.rows.running_sum(own_N) - own_N
    total_V = top.at_all(before_N).to(values_V.dtype) + values_V
    if not mean:
        return total_V
    earlier_N = ratio.rows.running_sum(counted_N) - counted_N
    return total_V / (top.at_all(earlier_N) + 1.0)
