"""SkyRL's `trainer.algorithm.off_policy_correction`, and losses whose ratio is to the sampler, as our `correction`."""

from __future__ import annotations

from megatron_rl.config.schema import Anchor, Level, Reduce, RejectRule, WeightConfig
from megatron_rl.workshop.translation.keys import NO_WEIGHT, Keys, Native, Translation, ratio_rule, weigh
from megatron_rl.workshop.translation.settings import settings

MASK = "sequence_mask_metric"
BY_SAMPLER = ("rollout_is", "dppo")
BY_COVARIANCE = ("clip_cov", "kl_cov")
WITHOUT_CORRECTION = ("importance_sampling", "cross_entropy")
BY_OLD_POLICY = ("regular", "dual_clip", "gspo", "cispo", "sapo")


def skyrl(mapping: Native) -> Translation:
    keys = settings("skyrl", mapping)
    if not keys.present and not keys.flag("use_tis", False):
        keys.note("there is no trainer.algorithm.off_policy_correction, so SkyRL corrects nothing")
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
        keys.note_kl("SkyRL")
    if loss == "gspo" and any(rule.level == Level.token for rule in rules):
        keys.note_gspo("SkyRL")
    anchor = Anchor.prox
    if loss in BY_SAMPLER or (loss == "cispo" and keys.text("cispo_anchor") == "rollout"):
        anchor = Anchor.sampler
        if weight.level != Level.none:
            raise keys.error("tis_ratio_type", f"the ratio of {loss} is to the sampler and holds the mismatch already")
        keys.note(f"the ratio of {loss} is to the sampler")
        keys.goes_with(name=loss)
        if rules:
            keys.note("SkyRL judges by the old policy, ours by the current one: the same with one update")
    return keys.translation(weight, rules, anchor=anchor)


def _weight(keys: Keys) -> WeightConfig:
    level = keys.choice("tis_ratio_type", None, "token", "sequence")
    if keys.flag("use_tis", False):
        if not keys.given("tis_imp_ratio_cap"):
            raise keys.error("tis_imp_ratio_cap", "use_tis needs a cap")
        return weigh(None, keys.positive("tis_imp_ratio_cap"))
    if level is None:
        return NO_WEIGHT
    name = f"{level}_tis_ratio_clip_high"
    cap = keys.positive(name, 2.0 if level == "token" else 5.0)
    if cap is None:
        raise keys.error(name, "SkyRL needs a number")
    return weigh(None, cap, level)


def _sequence_rules(keys: Keys) -> list[RejectRule]:
    rules = []
    metric = keys.choice(MASK, None, "geometric", "product")
    if metric == "geometric":
        low, high = keys.lower("geo_mask_low", 0.99), keys.positive("geo_mask_high", 1.01)
        rules.append(ratio_rule(low, high, Reduce.mean))
    elif metric == "product":
        low, high = keys.lower("product_mask_low", 0.5), keys.positive("product_mask_high", 2.0)
        rules.append(ratio_rule(low, high, Reduce.sum))
    if (low := keys.lower("outlier_token_is_threshold_low")) is not None:
        rules.append(ratio_rule(low, None, Reduce.min))
    if (high := keys.positive("outlier_token_is_threshold_high")) is not None:
        rules.append(ratio_rule(None, high, Reduce.max))
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
    return [ratio_rule(keys.lower(low_key), keys.positive(high_key))]
