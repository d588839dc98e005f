"""AReaL's decoupled loss (`actor.rejection_sampling`, `m2_threshold`, anchor) as `correction`."""

from dataclasses import replace

from megatron_rl.apps.translation.keys import NO_WEIGHT, UNWEIGHTED, Keys, ratio_rule, weigh
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    Level,
    NonFinite,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)

METHODS = ("recompute", "metrics", "reuse_train_logp", "loglinear")


def areal(keys: Keys) -> CorrectionConfig:
    rejects = keys.present
    decoupled = keys.flag("use_decoupled_loss", default=rejects)
    keys.refuse_if(rejects and not decoupled, "use_decoupled_loss", "needs_decoupled")
    keys.taken_as_true(rejects, "use_decoupled_loss", "without it AReaL corrects nothing")
    sapo = keys.flag("use_sapo_loss", False)
    keys.refuse_if(sapo and decoupled, "use_sapo_loss", "sapo")
    method = keys.choice("prox_logp_method", "recompute", *METHODS)
    interpolated = decoupled and method == "loglinear"
    by_itself = method == "reuse_train_logp" and not sapo
    keys.note_if(by_itself, "one_update", method=method)
    threshold = keys.positive("m2_threshold")
    keys.refuse_if(threshold is not None and not decoupled, "m2_threshold", "ignored")
    keys.refuse_if(threshold is not None and interpolated, "m2_threshold", "whole_batch")
    if not decoupled and not by_itself and not keys.flag("recompute_logprob", False):
        return keys.bypass()

    weight, rules, non_finite = _rejection(keys) if rejects else (NO_WEIGHT, [], NonFinite.one)
    renormalize = False
    if threshold is not None:
        keys.refuse_if(keys.text("level") == "sequence", "m2_threshold", "rows_left")
        for rule in rules:
            keys.refuse_if(rule.stat != Stat.ratio, "m2_threshold", "only_own")
            # a band of token ratios keeps the denominators as a weight that is zero outside it
            weight = weigh(rule.low, rule.high, mask=True)
            if keys.text("importance_sampling_level") == "sequence":
                keys.note_gspo("AReaL", "those inside the band", " by m2_threshold")
        rules = [RejectRule(level=Level.token, stat=Stat.m2, budget=threshold)]
        renormalize = True
        non_finite = NonFinite.drop  # a second moment that is NaN is the largest of all
        keys.note("solved")
    anchor = Anchor.interpolated if interpolated else Anchor.prox
    return keys.correction(weight, rules, renormalize, non_finite=non_finite, anchor=anchor)


def _rejection(keys: Keys) -> tuple[WeightConfig, list[RejectRule], NonFinite]:
    level = Level(keys.choice("level", "token", "token", "sequence") or "token")
    action = keys.choice("action", "mask", "mask", "clamp")
    metric = keys.choice("metric", "ratio", "ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
    agg = keys.choice("agg", "mean", "sum", "mean", "max") or "mean"
    upper = keys.needed("upper", "AReaL", 5.0)
    if metric == "ratio":
        keys.note_if(level == Level.sequence, "row_ratio")
        return *_by_ratio(keys, level, action == "clamp", agg, upper), NonFinite.one
    keys.refuse_if(action == "clamp", "action", "AReaL clamps with metric: ratio only")
    keys.refuse_if(metric == "kl_k3", "metric", "k3")
    rule = RejectRule(level=level, stat=Stat.k2, low=keys.number("lower"), high=upper)
    if metric == "binary_kl":
        rule = replace(rule, stat=Stat.binary_kl_max)
        keys.note("within")
    elif metric == "kl_k1":
        # AReaL's k1 is +d and ours is -d: the bounds change sign and sides, the largest becomes the
        # smallest
        high = None if rule.low is None else -rule.low
        rule = replace(rule, stat=Stat.k1, low=-upper, high=high)
        agg = "min" if agg == "max" else agg
    # a KL that is NaN is out of bounds; a ratio that is NaN counts as 1
    if level == Level.token:
        return UNWEIGHTED, [rule], NonFinite.zero
    keys.note("row_leaves")
    return UNWEIGHTED, [replace(rule, reduce=Reduce(agg))], NonFinite.reject


def _by_ratio(
    keys: Keys, level: Level, clamps: bool, agg: str, upper: float
) -> tuple[WeightConfig, list[RejectRule]]:
    """Weight and rule of ratio bounds: a sequence weighs its geometric mean, `agg` only decides."""
    lower = keys.lower("lower")
    keys.refuse_if(upper <= 1, "upper", "AReaL refuses a ratio of 1 or less")
    per_row = level == Level.sequence
    if clamps:
        keys.refuse_if(per_row and agg == "max" and lower is not None, "agg", "unclamped")
        keys.refuse_if(per_row and agg == "sum" and (lower or 0) > 1, "lower", "above_one")
        return weigh(lower, upper, level, mean=per_row), []
    return weigh(None, None, level, mean=per_row), [
        ratio_rule(lower, upper, Reduce(agg) if per_row else None)
    ]
