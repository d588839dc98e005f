"""verl's `algorithm.rollout_correction`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Anchor, CorrectionConfig, Level, Outside, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.translation.keys import Keys, Translation, in_section
from megatron_rl.translation.shared import NO_WEIGHT

KEYS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "bypass_mode",
    "loss_type",
)
# what verl divides by, and whether it has the sampler's logprobs
BESIDE = (
    "trainer.use_v1",
    "actor_rollout_ref.actor.loss_agg_mode",
    "actor_rollout_ref.rollout.calculate_log_probs",
)
LO_HI = "lo_hi in rollout_{}_threshold says it"
VETO = "verl has no veto now; write it as our rule {level: sequence, stat: ratio, reduce: min, low: ...}"
REMOVED = {
    "tis_imp_ratio_cap": "rollout_is: token with rollout_is_threshold: the cap does it",
    "rollout_is_level": "rollout_is says it",
    "rollout_is_mode": "rollout_is_threshold says it: a number truncates, lo_hi masks",
    "rollout_is_threshold_lower": LO_HI.format("is"),
    "rollout_rs_threshold_lower": LO_HI.format("rs"),
    "rollout_is_veto_threshold": VETO,
    "rollout_token_veto_threshold": VETO,
    "bypass_old_logprob_for_rollout": "bypass_mode does it",
}
RULES = {
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


def verl(mapping: Mapping[str, Any]) -> Translation:
    keys = in_section("verl", mapping, "algorithm.rollout_correction", KEYS, BESIDE, common=("loss_type",), old=REMOVED)
    if not keys.present:
        keys.notes.append("there is no algorithm.rollout_correction, so verl corrects nothing")
    weight, rules = _weight(keys), _rules(keys)
    reinforce = keys.choice("loss_type", "ppo_clip", "ppo_clip", "reinforce") == "reinforce"
    corrects = bool(rules) or weight.level != Level.none or keys.flag("bypass_mode", False)
    if corrects and not keys.flag("calculate_log_probs", True):
        raise keys.error("calculate_log_probs", "verl corrects nothing without it; set it, or leave the correction out")
    if any(rule.level == Level.sequence for rule in rules):
        keys.notes.append(
            "verl clamps each token's log-ratio to +-20 before summing a row: the same unless one exceeds that"
        )
    if keys.flag("bypass_mode", False):
        return _bypass(keys, weight, rules, reinforce)
    if weight.normalize and rules:
        raise keys.error(
            "rollout_is_batch_normalize", "with rollout_rs verl's mean includes rejected tokens, ours never does"
        )
    renormalize = _renormalize(keys, rules)
    config = CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=renormalize)
    return Translation(config, keys.notes)


def _bypass(keys: Keys, weight: WeightConfig, rules: list[RejectRule], reinforce: bool) -> Translation:
    """verl's new trainer only takes the sampler's logprobs as old ones; the legacy one reads the other keys too."""
    if rules or reinforce:
        if keys.flag("use_v1", False):
            name = "rollout_rs" if rules else "loss_type"
            raise keys.error(name, "verl ignores it in bypass_mode with trainer.use_v1; leave one of the three out")
        if not keys.given("use_v1"):
            keys.notes.append("with trainer.use_v1, its default, verl ignores rollout_rs and loss_type in bypass_mode")
        _refuse_mixed_denominators(keys, rules)
    if weight.normalize:
        raise keys.error("rollout_is_batch_normalize", "with bypass_mode the mean depends on the micro-batch split")
    if reinforce:
        keys.notes.append("goes with loss.name: reinforce")
    elif weight.level != Level.none:
        weight = NO_WEIGHT
        keys.notes.append("verl computes rollout_is for its metrics only here: the ratio of the loss is the correction")
    config = CorrectionConfig(anchor=Anchor.sampler, weight=weight, reject=rules, rebaseline=False, renormalize=False)
    return Translation(config, keys.notes)


def _renormalize(keys: Keys, rules: list[RejectRule]) -> bool:
    """Whether rejected tokens leave verl's denominators: with token-mean, under its legacy trainer."""
    if not rules:
        return True
    _refuse_mixed_denominators(keys, rules)
    if (keys.text("loss_agg_mode") or "token-mean").startswith("seq-mean"):
        return False
    if not keys.given("use_v1"):
        keys.notes.append(
            "verl's denominators count the tokens left, as here, with loss_agg_mode: token-mean and trainer.use_v1: "
            "false; those of its default trainer (use_v1: true) count all: set renormalize: false for that"
        )
    return not keys.flag("use_v1", False)


def _refuse_mixed_denominators(keys: Keys, rules: list[RejectRule]) -> None:
    if keys.text("loss_agg_mode") == "seq-mean-token-mean" and any(rule.level == Level.token for rule in rules):
        raise keys.error(
            "loss_agg_mode",
            "with token rules verl divides a row by its tokens left, but counts all rows: ours does not",
        )


def _weight(keys: Keys) -> WeightConfig:
    """A number truncates; `lo_hi` zeroes what is outside."""
    name = "rollout_is_threshold"
    level = keys.choice("rollout_is", None, "token", "sequence")
    if level is None:
        return NO_WEIGHT
    if keys.null(name):
        keys.notes.append(f"verl computes no weight where {name} is null")
        return NO_WEIGHT
    normalize = keys.flag("rollout_is_batch_normalize", False)
    text = keys.text(name)
    if text is not None and "_" in text:
        low, high = (keys.as_number(name, part) for part in text.split("_", 1))
        if not 0 < low < high:
            raise keys.error(name, "expected lo_hi with 0 < lo < hi")
        return WeightConfig(level=Level(level), outside=Outside.zero, low=low, high=high, normalize=normalize)
    return WeightConfig(level=Level(level), high=keys.positive(name, 2.0), normalize=normalize)


def _rules(keys: Keys) -> list[RejectRule]:
    """k1 bounds are bounds on 1/rho: they swap places and are inverted."""
    if not keys.given("rollout_rs"):
        return []
    names = list(dict.fromkeys(_words(keys, "rollout_rs")))
    unknown = [name for name in names if name not in RULES]
    if unknown or not names:
        found = f"no rule {unknown[0]}" if unknown else "no rule"
        raise keys.error("rollout_rs", f"{found}; known are {', '.join(RULES)}")
    bounds = _words(keys, "rollout_rs_threshold")
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise keys.error("rollout_rs_threshold", f"expected one threshold, or {len(names)} for {', '.join(names)}")
    return [_rule(keys, name, bound) for name, bound in zip(names, bounds, strict=True)]


def _words(keys: Keys, name: str) -> list[str]:
    return [word.strip() for word in (keys.text(name) or "").split(",") if word.strip()]


def _rule(keys: Keys, name: str, bound: str) -> RejectRule:
    parts = [keys.as_number("rollout_rs_threshold", part) for part in bound.split("_", 1)]
    if min(parts) <= 0:
        raise keys.error("rollout_rs_threshold", "expected numbers above 0")
    if name.endswith("k1"):
        low, high = parts if len(parts) == 2 else (1.0 / parts[0], parts[0])
        if low >= high:
            raise keys.error("rollout_rs_threshold", f"{name} would keep nothing: {low:g} is not below {high:g}")
        return replace(RULES[name], low=1.0 / high, high=1.0 / low)
    if len(parts) == 2:
        raise keys.error("rollout_rs_threshold", f"{name} takes one upper bound, not {bound}")
    return replace(RULES[name], high=parts[0])
