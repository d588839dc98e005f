"""AReaL's decoupled loss: `actor.rejection_sampling`, `m2_threshold` and what chooses the anchor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megatron_rl.schema import (
    Aggregate,
    Anchor,
    CorrectionConfig,
    Level,
    NonFinite,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)
from megatron_rl.translation.keys import Keys, Translation, nested, section

OUTER_KEYS = ("use_decoupled_loss", "recompute_logprob", "rejection_sampling", "m2_threshold", "prox_logp_method")
INNER_KEYS = ("level", "action", "metric", "agg", "upper", "lower")
NO_WEIGHT = WeightConfig(level=Level.none)


def areal(mapping: Mapping[str, Any]) -> Translation:
    outer = section(nested(mapping), "actor")
    keys = Keys("areal", outer, OUTER_KEYS, strict=False)
    inner = outer.get("rejection_sampling")
    decoupled = keys.flag("use_decoupled_loss", default=inner is not None)
    if keys.choice("prox_logp_method", "recompute", "recompute", "metrics", "loglinear") == "loglinear" and decoupled:
        raise keys.error("prox_logp_method", "ours computes the proximal logprobs, it does not interpolate them")
    if inner is not None and not decoupled:
        raise keys.error("use_decoupled_loss", "AReaL ignores rejection_sampling without it; set it, or leave that out")
    if not decoupled and not keys.flag("recompute_logprob", False):
        if keys.given("m2_threshold"):
            raise keys.error("m2_threshold", "it needs proximal logprobs: set use_decoupled_loss or recompute_logprob")
        config = CorrectionConfig(anchor=Anchor.sampler, weight=NO_WEIGHT, rebaseline=False, renormalize=False)
        return Translation(config, keys.notes)

    weight = NO_WEIGHT
    rules: list[RejectRule] = []
    if inner is not None:
        weight, rules = _rejection(Keys("areal", inner, INNER_KEYS))
    renormalize = False
    threshold = keys.positive("m2_threshold")
    if threshold is not None:
        if rules:
            raise keys.error(
                "m2_threshold", "AReaL applies rejection_sampling to what it left, and divides differently"
            )
        rules.append(RejectRule(level=Level.token, stat=Stat.m2, budget=threshold))
        renormalize = True
        keys.notes.append("m2_threshold: AReaL solves it in each micro-batch, ours in the batch: the same with one")
    config = CorrectionConfig(
        weight=weight, reject=rules, rebaseline=False, renormalize=renormalize, non_finite=NonFinite.one
    )
    return Translation(config, keys.notes)


def _rejection(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    level = Level(keys.choice("level", "token", "token", "sequence") or "token")
    action = keys.choice("action", "mask", "mask", "clamp")
    metric = keys.choice("metric", "ratio", "ratio", "kl_k1", "kl_k2", "kl_k3")
    agg = keys.choice("agg", "mean", "sum", "mean", "max") or "mean"
    upper = keys.number("upper", 5.0)
    lower = keys.number("lower")
    assert upper is not None
    # ratios of a sequence weigh it by their geometric mean, whatever `agg` decides by
    geometric = level == Level.sequence and metric == "ratio"
    aggregate = Aggregate.geometric if geometric else Aggregate.product
    weight_level = Level.sequence if geometric else Level.token
    if action == "clamp":
        if metric != "ratio":
            raise keys.error("action", "AReaL clamps with metric: ratio only")
        if geometric and agg == "max" and lower is not None:
            raise keys.error("agg", "with a lower bound AReaL leaves some means below it unclamped")
        if geometric and agg == "sum" and lower is not None and lower > 1:
            raise keys.error("lower", "above 1 AReaL leaves some means below it unclamped")
        return WeightConfig(level=weight_level, aggregate=aggregate, low=lower or None, high=upper), []
    weight = WeightConfig(level=weight_level, aggregate=aggregate, high=None)
    reduce = None if level == Level.token else Reduce(agg)
    if metric == "kl_k3":
        raise keys.error("metric", "AReaL's k3 is exp(-d) - 1 + d, the other direction of KL; bound the ratio instead")
    if metric == "kl_k2":
        return weight, [RejectRule(level=level, stat=Stat.k2, reduce=reduce, low=lower, high=upper)]
    if metric == "kl_k1":
        # AReaL's k1 is +d, so its bounds are bounds on log rho
        upper = math.exp(upper)
        lower = None if lower is None else math.exp(lower)
    return weight, [RejectRule(level=level, stat=Stat.ratio, reduce=reduce, low=lower, high=upper)]
