"""AReaL's decoupled loss (`actor.rejection_sampling`, `m2_threshold`, what chooses the anchor) as our `correction`."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.schema import Anchor, Level, NonFinite, Outside, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import NO_WEIGHT, UNWEIGHTED, Keys, Native, Translation, ratio_rule, weigh
from megatron_rl.workshop.translation.settings import settings

METHODS = ("recompute", "metrics", "reuse_train_logp", "loglinear")
NEEDS_DECOUPLED = "AReaL ignores it without use_decoupled_loss; set that, or leave this out"


def areal(mapping: Native) -> Translation:
    keys = settings("areal", mapping, bare=False)
    rejects = keys.present
    decoupled = keys.flag("use_decoupled_loss", default=rejects)
    if rejects and not decoupled:
        raise keys.error("use_decoupled_loss", "AReaL ignores rejection_sampling without it; set it, or leave that out")
    if rejects:
        keys.taken_as_true("use_decoupled_loss", "without it AReaL corrects nothing")
    sapo = keys.flag("use_sapo_loss", False)
    if sapo and decoupled:
        raise keys.error("use_sapo_loss", "AReaL refuses it with use_decoupled_loss; leave one of them out")
    method = keys.choice("prox_logp_method", "recompute", *METHODS)
    interpolated = decoupled and method == "loglinear"
    by_itself = method == "reuse_train_logp" and not sapo
    if by_itself:
        keys.note(f"{method}: AReaL makes one update per batch with it; goes with learner.n_minibatches: 1")
    threshold = keys.positive("m2_threshold")
    if threshold is not None and not decoupled:
        raise keys.error("m2_threshold", NEEDS_DECOUPLED)
    if threshold is not None and interpolated:
        raise keys.error("m2_threshold", "it looks at the whole batch, before which nothing is interpolated")
    if not decoupled and not by_itself and not keys.flag("recompute_logprob", False):
        return keys.bypass()

    weight, rules, non_finite = _rejection(keys) if rejects else (NO_WEIGHT, [], NonFinite.one)
    renormalize = False
    if threshold is not None:
        if weight.level == Level.sequence or (rules and rules[0].level == Level.sequence):
            raise keys.error("m2_threshold", "AReaL judges and weighs rows by the tokens it left, ours by all of them")
        if rules:
            if rules[0].stat != Stat.ratio:
                raise keys.error("m2_threshold", "only its own tokens leave AReaL's denominators, those of a KL do not")
            # a band of token ratios keeps the denominators as a weight that is zero outside it
            weight = replace(weight, outside=Outside.zero, low=rules[0].low, high=rules[0].high)
            if keys.text("importance_sampling_level") == "sequence":
                keys.note_gspo("AReaL", "those inside the band", " by m2_threshold")
        rules = [RejectRule(level=Level.token, stat=Stat.m2, budget=threshold)]
        renormalize = True
        non_finite = NonFinite.drop  # a second moment that is NaN is the largest of all
        keys.note("m2_threshold: AReaL solves it in each micro-batch, ours in the batch: the same with one")
    anchor = Anchor.interpolated if interpolated else Anchor.prox
    return keys.translation(weight, rules, renormalize, non_finite=non_finite, anchor=anchor)


def _rejection(keys: Keys) -> tuple[WeightConfig, list[RejectRule], NonFinite]:
    level = Level(keys.choice("level", "token", "token", "sequence") or "token")
    action = keys.choice("action", "mask", "mask", "clamp")
    metric = keys.choice("metric", "ratio", "ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl")
    agg = keys.choice("agg", "mean", "sum", "mean", "max") or "mean"
    upper = keys.number("upper", 5.0)
    if upper is None:
        raise keys.error("upper", "AReaL needs a number")
    if metric == "ratio":
        if level == Level.sequence:
            keys.note("a token without a sampler logprob has the row's ratio in AReaL, weight 1 here")
        return *_by_ratio(keys, level, action, agg, upper), NonFinite.one
    if action == "clamp":
        raise keys.error("action", "AReaL clamps with metric: ratio only")
    if metric == "kl_k3":
        raise keys.error("metric", "AReaL's k3 is exp(-d) - 1 + d, the other direction of KL; bound the ratio instead")
    lower = keys.number("lower")
    reduce = None if level == Level.token else Reduce(agg)
    stat = Stat.binary_kl_max if metric == "binary_kl" else Stat.k2
    if metric == "binary_kl":
        keys.note("AReaL holds both probabilities within 1e-8 and 1 - 1e-8: the same unless one is beyond that")
    rule = RejectRule(level=level, stat=stat, reduce=reduce, low=lower, high=upper)
    if metric == "kl_k1":
        # AReaL's k1 is +d and ours is -d: the bounds change sign and sides, the largest becomes the smallest
        reduce = Reduce.min if reduce == Reduce.max else reduce
        rule = RejectRule(level=level, stat=Stat.k1, reduce=reduce, low=-upper, high=None if lower is None else -lower)
    # a KL that is NaN is out of bounds; a ratio that is NaN counts as 1
    if level == Level.token:
        return UNWEIGHTED, [rule], NonFinite.zero
    keys.note("a row that lacks a sampler logprob leaves the denominators here, not AReaL's")
    return UNWEIGHTED, [rule], NonFinite.reject


Found = tuple[WeightConfig, list[RejectRule]]


def _by_ratio(keys: Keys, level: Level, action: str | None, agg: str, upper: float) -> Found:
    """Ratios of a sequence weigh it by their geometric mean, whatever `agg` decides by."""
    lower = keys.lower("lower")
    if upper <= 1:
        raise keys.error("upper", "AReaL refuses a ratio of 1 or less")
    per_row = level == Level.sequence
    if action == "clamp":
        if per_row and agg == "max" and lower is not None:
            raise keys.error("agg", "with a lower bound AReaL leaves some means below it unclamped")
        if per_row and agg == "sum" and lower is not None and lower > 1:
            raise keys.error("lower", "above 1 AReaL leaves some means below it unclamped")
        return weigh(lower, upper, level, mean=per_row), []
    return weigh(None, None, level, mean=per_row), [ratio_rule(lower, upper, Reduce(agg) if per_row else None)]
