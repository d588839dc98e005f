"""verl's `algorithm.rollout_correction` and SkyRL's `trainer.algorithm.off_policy_correction`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.schema import Anchor, CorrectionConfig, Level, Outside, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.translation.keys import Keys, Translation, leaves, section

VERL_KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
VERL_RULES = {
    "token_k1": RejectRule(level=Level.token, stat=Stat.ratio),
    "token_k2": RejectRule(level=Level.token, stat=Stat.k2),
    "token_k3": RejectRule(level=Level.token, stat=Stat.k3),
    "seq_sum_k1": RejectRule(stat=Stat.ratio, reduce=Reduce.sum),
    "seq_sum_k2": RejectRule(stat=Stat.k2, reduce=Reduce.sum),
    "seq_sum_k3": RejectRule(stat=Stat.k3, reduce=Reduce.sum),
    "seq_mean_k1": RejectRule(stat=Stat.ratio, reduce=Reduce.mean),
    "seq_mean_k2": RejectRule(stat=Stat.k2, reduce=Reduce.mean),
    "seq_mean_k3": RejectRule(stat=Stat.k3, reduce=Reduce.mean),
    "seq_max_k2": RejectRule(stat=Stat.k2, reduce=Reduce.max),
    "seq_max_k3": RejectRule(stat=Stat.k3, reduce=Reduce.max),
}
NO_WEIGHT = WeightConfig(level=Level.none)


def verl(mapping: Mapping[str, Any]) -> Translation:
    keys = Keys("verl", section(mapping, "algorithm", "rollout_correction"), VERL_KEYS)
    notes = keys.notes
    level = keys.choice("rollout_is", None, "token", "sequence")
    weight = NO_WEIGHT if level is None else _verl_weight(keys, Level(level))
    rules = _verl_rules(keys)
    bypass = keys.flag("bypass_mode", False)
    if keys.flag("rollout_is_batch_normalize", False) and level is not None:
        if bypass:
            raise keys.error("rollout_is_batch_normalize", "with bypass_mode the mean depends on the micro-batch split")
        if rules:
            raise keys.error(
                "rollout_is_batch_normalize", "with rollout_rs verl's mean includes rejected tokens, ours never does"
            )
        weight = replace(weight, normalize=True)
    if any(rule.level == Level.sequence for rule in rules):
        notes.append(
            "verl clamps each token's log-ratio to +-20 before summing a row: the same unless one exceeds that"
        )
    if not bypass:
        return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False), notes)
    if keys.choice("loss_type", "ppo_clip", "ppo_clip", "reinforce") == "reinforce":
        notes.append("goes with loss.name: reinforce")
    else:
        weight = NO_WEIGHT
        notes.append("verl computes rollout_is for its metrics only here: the ratio of the loss is the correction")
    if rules:
        notes.append("verl divides by the tokens left in a micro-batch, ours by those of the batch before rejection")
    config = CorrectionConfig(anchor=Anchor.sampler, weight=weight, reject=rules, rebaseline=False, renormalize=False)
    return Translation(config, notes)


def _verl_weight(keys: Keys, level: Level) -> WeightConfig:
    """A number truncates; `lo_hi` zeroes what is outside."""
    text = keys.text("rollout_is_threshold")
    if text is not None and "_" in text:
        low, high = (keys.as_number("rollout_is_threshold", part) for part in text.split("_", 1))
        if not 0 < low < high:
            raise keys.error("rollout_is_threshold", "expected lo_hi with 0 < lo < hi")
        return WeightConfig(level=level, outside=Outside.zero, low=low, high=high)
    return WeightConfig(level=level, high=keys.positive("rollout_is_threshold", 2.0))


def _verl_rules(keys: Keys) -> list[RejectRule]:
    """k1 bounds are bounds on 1/rho: they swap places and are inverted."""
    names = [name.strip() for name in (keys.text("rollout_rs") or "").split(",") if name.strip()]
    names = list(dict.fromkeys(names))
    if not names:
        return []
    unknown = [name for name in names if name not in VERL_RULES]
    if unknown:
        raise keys.error("rollout_rs", f"no rule {unknown[0]}; known are {', '.join(VERL_RULES)}")
    bounds = [part.strip() for part in (keys.text("rollout_rs_threshold") or "").split(",") if part.strip()]
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise keys.error("rollout_rs_threshold", f"expected one threshold, or {len(names)} for {', '.join(names)}")
    rules = []
    for name, bound in zip(names, bounds, strict=True):
        parts = [keys.as_number("rollout_rs_threshold", part) for part in bound.split("_", 1)]
        if min(parts) <= 0:
            raise keys.error("rollout_rs_threshold", "expected numbers above 0")
        if name.endswith("k1"):
            low, high = parts if len(parts) == 2 else (1.0 / parts[0], parts[0])
            if low >= high:
                raise keys.error("rollout_rs_threshold", f"{name} would keep nothing: {low:g} is not below {high:g}")
            rules.append(replace(VERL_RULES[name], low=1.0 / high, high=1.0 / low))
        elif len(parts) == 2:
            raise keys.error("rollout_rs_threshold", f"{name} takes one upper bound, not {bound}")
        else:
            rules.append(replace(VERL_RULES[name], high=parts[0]))
    return rules


SKYRL_KEYS = (
    "tis_ratio_type",
    "token_tis_ratio_clip_high",
    "sequence_tis_ratio_clip_high",
    "sequence_mask_metric",
    "geo_mask_high",
    "geo_mask_low",
    "product_mask_high",
    "product_mask_low",
    "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high",
    "token_mask_is_threshold_low",
    "token_mask_is_threshold_high",
)
SKYRL_DEPRECATED = ("use_tis", "tis_imp_ratio_cap")


def skyrl(mapping: Mapping[str, Any]) -> Translation:
    algorithm = section(mapping, "trainer", "algorithm")
    inner = section(algorithm, "off_policy_correction")
    nested_here = inner is not algorithm
    values = dict(leaves(inner))
    if nested_here:
        values |= {name: algorithm[name] for name in SKYRL_DEPRECATED if name in algorithm}
    keys = Keys("skyrl", values, SKYRL_KEYS + SKYRL_DEPRECATED)
    level = keys.choice("tis_ratio_type", None, "token", "sequence")
    cap_key = f"{level}_tis_ratio_clip_high"
    if keys.flag("use_tis", False):
        level, cap_key = "token", "tis_imp_ratio_cap"
    weight = NO_WEIGHT
    if level is not None:
        default = {"token_tis_ratio_clip_high": 2.0, "sequence_tis_ratio_clip_high": 5.0}.get(cap_key)
        cap = keys.positive(cap_key, default)
        if cap is None:
            raise keys.error(cap_key, "use_tis needs a cap")
        weight = WeightConfig(level=Level(level), high=cap)

    rules = []
    metric = keys.choice("sequence_mask_metric", None, "geometric", "product")
    if metric == "geometric":
        low, high = keys.number("geo_mask_low", 0.99), keys.number("geo_mask_high", 1.01)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.mean, low=low, high=high))
    elif metric == "product":
        low, high = keys.number("product_mask_low", 0.5), keys.number("product_mask_high", 2.0)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.sum, low=low, high=high))
    outlier_low = keys.positive("outlier_token_is_threshold_low")
    outlier_high = keys.positive("outlier_token_is_threshold_high")
    if outlier_low is not None:
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.min, low=outlier_low))
    if outlier_high is not None:
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.max, high=outlier_high))

    low_key, high_key = "token_mask_is_threshold_low", "token_mask_is_threshold_high"
    low, high = keys.positive(low_key), keys.positive(high_key)
    if (low is None) != (high is None):
        raise keys.error(low_key if high is None else high_key, "SkyRL ignores one bound without the other; set both")
    if low is not None:
        if metric is not None:
            raise keys.error(
                "sequence_mask_metric", "SkyRL evaluates it on what token_mask_is_threshold_* left, ours on all"
            )
        if level == "sequence":
            raise keys.error("tis_ratio_type", "SkyRL takes the product over what token_mask_is_threshold_* left")
        rules.append(RejectRule(level=Level.token, stat=Stat.ratio, low=low, high=high))
    config = CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False)
    return Translation(config, keys.notes)
