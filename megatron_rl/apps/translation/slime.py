"""slime's flags (TIS and its variants, MIS, off-policy sequence masking) as our `correction`."""

from dataclasses import replace

from megatron_rl.apps.translation.keys import NO_WEIGHT, Keys, opsm, ratio_rule, weigh
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    Level,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)

FUNCTION = "custom_tis_function_path"
PARTIAL = "partial_rollout"
MASK_OLD = "mask_offpolicy_in_partial_rollout"
METRICS = "get_mismatch_metrics"
MIS = (
    "use_rs",
    "tis_level",
    "rs_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "tis_batch_normalize",
)
LEVELS = ("token", "sequence", "geometric")
REDUCE = {"sequence": Reduce.sum, "geometric": Reduce.mean}


def slime(keys: Keys) -> CorrectionConfig:
    if keys.flag("use_unbiased_kl", False) and keys.flag("use_kl_loss", True):
        _unbiased_kl(keys)
    by_sampler = keys.flag("use_rollout_logprobs", False)
    keys.refuse_if(
        by_sampler and keys.flag("use_tis", False),
        "use_tis",
        "slime refuses it with use_rollout_logprobs",
    )
    weight, rules = _correction(keys)
    keys.refuse_if(by_sampler and weight.level != Level.none, METRICS, "icepop")
    if keys.text("advantage_estimator") == "gspo" and any(
        rule.level == Level.token for rule in rules
    ):
        keys.note_gspo("slime")
    if keys.flag("use_opsm", False):
        rules.append(opsm(keys.needed("opsm_delta", "slime", 1e-4)))
        keys.note("opsm_current" if by_sampler else "opsm_old")
        keys.note_kl("slime", "what use_opsm, not what use_rs, rejects")
    if keys.flag(MASK_OLD, False):
        rules.insert(0, _fresh(keys))
    anchor = Anchor.sampler if by_sampler else Anchor.prox
    return keys.centered(keys.correction(weight, rules, anchor=anchor), "use_score_centering")


def _unbiased_kl(keys: Keys) -> None:
    """Translate its KL ratio, which carries a gradient: exact for k3, refused for k1 and k2."""
    kind = keys.choice("kl_loss_type", "k1", "k1", "k2", "k3", "low_var_kl")
    keys.refuse_if(kind in ("k1", "k2", None), "use_unbiased_kl", "only_k3")
    keys.note_if(kind == "low_var_kl", "bounded")
    keys.goes_with(kl_cap=1e9, kl_estimator="k3")


def _fresh(keys: Keys) -> RejectRule:
    """Leave out what was written before the call that finished the batch."""
    keys.refuse_if(not keys.flag(PARTIAL, True), MASK_OLD, "needs_partial")
    keys.taken_as_true(True, PARTIAL, "without it slime masks nothing here")
    keys.note("completing")
    keys.note("whole_row")
    return RejectRule(level=Level.token, stat=Stat.staleness, high=0.0)


def _correction(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    function = keys.text(FUNCTION) or ""
    mis = [name for name in MIS if keys.given(name)]
    is_mis = function.endswith("compute_mis_weights_with_cp")
    wanted = keys.flag("use_tis", False)
    if mis and function and not is_mis:
        raise keys.error(mis[0], f"{FUNCTION} {function} does not read it")
    keys.refuse_if(is_mis and not mis and wanted, FUNCTION, "other_file")
    keys.refuse_if(mis and not wanted and keys.flag("use_rs", False), "use_rs", "needs_tis")
    if mis and wanted:
        keys.note_if(not function, "helper")
        return _mis(keys)
    # the metrics call the function too, and an icepop that is called is an icepop that weighs
    if not wanted and not (function and not is_mis and keys.flag(METRICS, False)):
        return NO_WEIGHT, []
    keys.refuse_if(function and not function.endswith("icepop_function"), FUNCTION, "custom")
    return weigh(
        keys.lower("tis_clip_low"), keys.positive("tis_clip", 2.0), mask=bool(function)
    ), []


def _mis(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    """MIS of its example: weights, rejection and a veto, per token, product or geometric mean."""
    level = keys.choice("tis_level", "token", *LEVELS) or "token"
    mode = keys.choice("tis_mode", "truncate", "truncate", "clip", "mask")
    rejects = keys.flag("use_rs", False)
    normalize = keys.flag("tis_batch_normalize", False)
    if normalize:
        keys.refuse_if(rejects or mode == "mask", "tis_batch_normalize", "normalized")
        keys.refuse_if(
            level == "geometric", "tis_batch_normalize", "slime refuses it with tis_level geometric"
        )
        keys.note("micro_batch")
    high = keys.positive("tis_upper_bound")
    if high is None:
        raise keys.error("tis_upper_bound", "slime needs it")
    low = keys.positive("tis_lower_bound") or 1.0 / high
    kind = "token" if level == "token" else "sequence"
    low_cap = None if mode == "truncate" else low
    weight = weigh(low_cap, high, kind, mask=mode == "mask", mean=level == "geometric")
    keys.note_if(mode == "mask", "masked")
    return replace(weight, normalize=normalize), _rejection(keys, low, high) if rejects else []


def _rejection(keys: Keys, low: float, high: float) -> list[RejectRule]:
    level = keys.choice("rs_level", "token", *LEVELS) or "token"
    low = keys.positive("rs_lower_bound") or low
    high = keys.positive("rs_upper_bound") or high
    veto = keys.positive("rs_veto_threshold")
    rules = [ratio_rule(low, high, REDUCE.get(level))]
    if veto is not None:
        rules.append(ratio_rule(veto, None, Reduce.min))
    return rules
