"""SkyRL's `trainer.algorithm.off_policy_correction`, and the losses whose ratio is to the sampler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.schema import Anchor, Level, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import NO_WEIGHT, Keys, Translation, gspo_tokens, keeps_kl
from megatron_rl.workshop.translation.settings import in_section

ALGORITHM = "trainer.algorithm"
MASK = "sequence_mask_metric"
KEYS = (
    "tis_ratio_type", "token_tis_ratio_clip_high", "sequence_tis_ratio_clip_high", MASK,
    "geo_mask_high", "geo_mask_low", "product_mask_high", "product_mask_low", "outlier_token_is_threshold_low",
    "outlier_token_is_threshold_high", "token_mask_is_threshold_low", "token_mask_is_threshold_high",
)  # fmt: skip
SETTINGS = ("use_tis", "tis_imp_ratio_cap", "policy_loss_type", "cispo.cispo_anchor")
BESIDE = tuple(f"{ALGORITHM}.{name}" for name in SETTINGS)
BY_SAMPLER = ("rollout_is", "dppo")
BY_COVARIANCE = ("clip_cov", "kl_cov")
WITHOUT_CORRECTION = ("importance_sampling", "cross_entropy")
BY_OLD_POLICY = ("regular", "dual_clip", "gspo", "cispo", "sapo")


def skyrl(mapping: Mapping[str, Any]) -> Translation:
    keys = in_section("skyrl", mapping, f"{ALGORITHM}.off_policy_correction", KEYS, BESIDE)
    if not keys.present and not keys.flag("use_tis", False):
        keys.note(f"there is no {ALGORITHM}.off_policy_correction, so SkyRL corrects nothing")
    weight = _weight(keys)
    rules = _sequence_rules(keys) + _token_rules(keys, weight)
    loss = keys.choice("policy_loss_type", None, *BY_OLD_POLICY, *BY_SAMPLER, *BY_COVARIANCE, *WITHOUT_CORRECTION)
    if loss in WITHOUT_CORRECTION and (rules or weight.level != Level.none):
        raise keys.error("policy_loss_type", "this loss of SkyRL ignores off_policy_correction; leave one of them out")
    if loss in BY_COVARIANCE and (weight.level != Level.none or keys.given(MASK)):
        raise keys.error("policy_loss_type", "SkyRL refuses it with TIS or a sequence mask; leave one of them out")
    if loss in BY_COVARIANCE and rules:
        rules = []
        keys.note(f"with {loss} SkyRL ignores outlier_token_is_* and token_mask_is_*, and so does this")
    if rules:
        keys.note(keeps_kl("SkyRL"))
    if loss == "gspo" and any(rule.level == Level.token for rule in rules):
        keys.note(gspo_tokens("SkyRL"))
    anchor = Anchor.prox
    if loss in BY_SAMPLER or (loss == "cispo" and keys.text("cispo_anchor") == "rollout"):
        anchor = Anchor.sampler
        if weight.level != Level.none:
            raise keys.error("tis_ratio_type", f"the ratio of {loss} is to the sampler and holds the mismatch already")
        keys.note(f"the ratio of {loss} is to the sampler; goes with loss.name: {loss}")
        if rules:
            keys.note("SkyRL judges by the old policy, ours by the current one: the same with one update")
    return keys.translation(weight, rules, anchor=anchor)


def _weight(keys: Keys) -> WeightConfig:
    level = keys.choice("tis_ratio_type", None, "token", "sequence")
    if keys.flag("use_tis", False):
        if not keys.given("tis_imp_ratio_cap"):
            raise keys.error("tis_imp_ratio_cap", "use_tis needs a cap")
        return WeightConfig(level=Level.token, high=keys.positive("tis_imp_ratio_cap"))
    if level is None:
        return NO_WEIGHT
    name, default = {"token": ("token_tis_ratio_clip_high", 2.0), "sequence": ("sequence_tis_ratio_clip_high", 5.0)}[
        level
    ]
    cap = keys.positive(name, default)
    if cap is None:
        raise keys.error(name, "SkyRL needs a number")
    return WeightConfig(level=Level(level), high=cap)


def _sequence_rules(keys: Keys) -> list[RejectRule]:
    rules = []
    metric = keys.choice(MASK, None, "geometric", "product")
    if metric == "geometric":
        low, high = keys.lower("geo_mask_low", 0.99), keys.positive("geo_mask_high", 1.01)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.mean, low=low, high=high))
    elif metric == "product":
        low, high = keys.lower("product_mask_low", 0.5), keys.positive("product_mask_high", 2.0)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.sum, low=low, high=high))
    low = keys.lower("outlier_token_is_threshold_low")
    if low is not None:
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.min, low=low))
    high = keys.positive("outlier_token_is_threshold_high")
    if high is not None:
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.max, high=high))
    return rules


def _token_rules(keys: Keys, weight: WeightConfig) -> list[RejectRule]:
    low_key, high_key = "token_mask_is_threshold_low", "token_mask_is_threshold_high"
    given = [name for name in (low_key, high_key) if keys.given(name)]
    if not given:
        return []
    if len(given) == 1:
        raise keys.error(given[0], "SkyRL ignores one bound without the other; set both")
    if keys.given(MASK):
        raise keys.error(MASK, "SkyRL evaluates it on what token_mask_is_threshold_* left, ours on all")
    if weight.level == Level.sequence:
        raise keys.error("tis_ratio_type", "SkyRL takes the product over what token_mask_is_threshold_* left")
    return [RejectRule(level=Level.token, stat=Stat.ratio, low=keys.lower(low_key), high=keys.positive(high_key))]
