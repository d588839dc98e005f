"""SkyRL's `trainer.algorithm.off_policy_correction` and sampler-ratio losses as `correction`."""

from megatron_rl.apps.translation.keys import NO_WEIGHT, Keys, ratio_rule, weigh
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    Level,
    Reduce,
    RejectRule,
    WeightConfig,
)

MASK = "sequence_mask_metric"
MASKS = {
    "geometric": ("geo", 0.99, 1.01, Reduce.mean),
    "product": ("product", 0.5, 2.0, Reduce.sum),
}
BY_SAMPLER = ("rollout_is", "dppo")
BY_COVARIANCE = ("clip_cov", "kl_cov")
WITHOUT_CORRECTION = ("importance_sampling", "cross_entropy")
BY_OLD_POLICY = ("regular", "dual_clip", "gspo", "cispo", "sapo")


def skyrl(keys: Keys) -> CorrectionConfig:
    keys.note_if(not keys.present and not keys.flag("use_tis", False), "nothing")
    weight = _weight(keys)
    rules = _sequence_rules(keys) + _token_rules(keys, weight)
    loss = keys.choice(
        "policy_loss_type", None, *BY_OLD_POLICY, *BY_SAMPLER, *BY_COVARIANCE, *WITHOUT_CORRECTION
    )
    weighs = weight.level != Level.none
    keys.refuse_if(loss in WITHOUT_CORRECTION and (rules or weighs), "policy_loss_type", "ignores")
    keys.refuse_if(
        loss in BY_COVARIANCE and (weighs or keys.given(MASK)), "policy_loss_type", "covariance"
    )
    if loss in BY_COVARIANCE:
        keys.note_if(rules, "token_rules", loss=loss)
        rules = []
    if rules:
        keys.note_kl("SkyRL")
    if loss == "gspo" and any(rule.level == Level.token for rule in rules):
        keys.note_gspo("SkyRL")
    anchor = Anchor.prox
    if loss in BY_SAMPLER or (loss == "cispo" and keys.text("cispo_anchor") == "rollout"):
        anchor = Anchor.sampler
        keys.refuse_if(weighs, "tis_ratio_type", "holds", loss=loss)
        keys.note(f"the ratio of {loss} is to the sampler")
        keys.goes_with(name=loss)
        keys.note_if(rules, "judges")
    return keys.centered(keys.correction(weight, rules, anchor=anchor), "enabled")


def _weight(keys: Keys) -> WeightConfig:
    level = keys.choice("tis_ratio_type", None, "token", "sequence")
    if keys.flag("use_tis", False):
        keys.refuse_if(
            not keys.given("tis_imp_ratio_cap"), "tis_imp_ratio_cap", "use_tis needs a cap"
        )
        return weigh(None, keys.positive("tis_imp_ratio_cap"))
    if level is None:
        return NO_WEIGHT
    name = f"{level}_tis_ratio_clip_high"
    cap = keys.positive(name, 2.0 if level == "token" else 5.0)
    keys.refuse_if(cap is None, name, "SkyRL needs a number")
    return weigh(None, cap, level)


def _sequence_rules(keys: Keys) -> list[RejectRule]:
    rules = []
    metric = keys.choice(MASK, None, *MASKS)
    if metric is not None:
        kind, least, most, reduce = MASKS[metric]
        bounds = keys.lower(f"{kind}_mask_low", least), keys.positive(f"{kind}_mask_high", most)
        rules.append(ratio_rule(*bounds, reduce))
    if (low := keys.lower("outlier_token_is_threshold_low")) is not None:
        rules.append(ratio_rule(low, None, Reduce.min))
    if (high := keys.positive("outlier_token_is_threshold_high")) is not None:
        rules.append(ratio_rule(None, high, Reduce.max))
    return rules


def _token_rules(keys: Keys, weight: WeightConfig) -> list[RejectRule]:
    low_key = "token_mask_is_threshold_low"
    high_key = "token_mask_is_threshold_high"
    given = [name for name in (low_key, high_key) if keys.given(name)]
    if not given:
        return []
    keys.refuse_if(len(given) == 1, given[0], "one_bound")
    keys.refuse_if(keys.given(MASK), MASK, "left")
    keys.refuse_if(weight.level == Level.sequence, "tis_ratio_type", "product")
    return [ratio_rule(keys.lower(low_key), keys.positive(high_key))]
