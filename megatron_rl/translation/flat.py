"""Projects whose correction is a handful of flat settings: TRL, NeMo-RL, OpenRLHF, slime, the fw-ai cookbook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.schema import (
    Aggregate,
    Anchor,
    CorrectionConfig,
    Level,
    NonFinite,
    Outside,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
    When,
)
from megatron_rl.translation.keys import Keys, Translation, leaves, nested, section

NO_WEIGHT = WeightConfig(level=Level.none)
BYPASS = CorrectionConfig(anchor=Anchor.sampler, weight=NO_WEIGHT, rebaseline=False, renormalize=False)
OPSM_NOTE = "judges by the proximal policy, {name} by the current one: the same with one update per batch"

TRL_KEYS = (
    "use_vllm",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
    "off_policy_mask_threshold",
    "use_bias_correction_kl",
)


def trl(mapping: Mapping[str, Any]) -> Translation:
    keys = Keys("trl", leaves(mapping), TRL_KEYS, strict=False)
    if keys.flag("use_bias_correction_kl", False):
        raise keys.error("use_bias_correction_kl", "our KL term takes no importance weight")
    weight = NO_WEIGHT
    if keys.flag("use_vllm", True) and keys.flag("vllm_importance_sampling_correction", True):
        modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
        mode = keys.choice("vllm_importance_sampling_mode", "sequence_mask", *modes)
        if mode is None:
            raise keys.error("vllm_importance_sampling_mode", f"expected one of {', '.join(modes)}")
        level, action = mode.split("_")
        high_key = "vllm_importance_sampling_clip_max"
        high = keys.positive("vllm_importance_sampling_cap") or keys.positive(high_key, 3.0)
        low = keys.positive("vllm_importance_sampling_clip_min")
        bounded = high is not None or low is not None
        outside = Outside.zero if action == "mask" and bounded else Outside.truncate
        weight = WeightConfig(level=Level(level), outside=outside, low=low, high=high)
    rules = []
    threshold = keys.positive("off_policy_mask_threshold")
    if threshold is not None:
        rules.append(_opsm(threshold))
        keys.notes.append(f"off_policy_mask_threshold: {OPSM_NOTE.format(name='TRL')}")
    return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False), keys.notes)


def _opsm(delta: float) -> RejectRule:
    return RejectRule(stat=Stat.k1, reduce=Reduce.mean, high=delta, when=When.negative_advantage)


NEMO_KEYS = (
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "sequence_level_importance_ratios",
    "seq_logprob_error_threshold",
    "force_on_policy_ratio",
)


def nemo_rl(mapping: Mapping[str, Any]) -> Translation:
    keys = Keys("nemo_rl", leaves(mapping), NEMO_KEYS, strict=False)
    kind_key, high_key = "truncated_importance_sampling_type", "truncated_importance_sampling_ratio"
    low_key = "truncated_importance_sampling_ratio_min"
    kind = keys.choice(kind_key, None, "tis", "icepop", "seq-mask-tis")
    high, low = keys.positive(high_key), keys.number(low_key)
    per_sequence = keys.flag("sequence_level_importance_ratios", False)
    rules: list[RejectRule] = []
    renormalize = True
    weight = NO_WEIGHT
    if not keys.flag("use_importance_sampling_correction", False):
        if kind is not None:
            raise keys.error(kind_key, "NeMo-RL needs use_importance_sampling_correction: true with it")
    else:
        if kind is not None and high is None:
            raise keys.error(high_key, f"{kind_key} {kind} needs it")
        if kind is None and high is not None:
            raise keys.error(high_key, f"NeMo-RL needs {kind_key} with it")
        if kind in ("icepop", "seq-mask-tis") and low is None:
            raise keys.error(low_key, f"{kind_key} {kind} needs it")
        level = Level.sequence if per_sequence else Level.token
        if kind == "seq-mask-tis":
            if per_sequence:
                raise keys.error(kind_key, "NeMo-RL refuses it with sequence_level_importance_ratios")
            weight, renormalize = WeightConfig(level=level, high=None), False
            rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.mean, low=low, high=high))
        elif kind == "icepop":
            weight = WeightConfig(level=level, outside=Outside.zero, low=low, high=high)
        else:
            weight = WeightConfig(level=level, low=low if low else None, high=high)
        keys.notes.append("a token without a sampler logprob has weight 0" + (", the row in NeMo-RL" * per_sequence))
    if keys.flag("force_on_policy_ratio", False):
        keys.notes.append("force_on_policy_ratio: the same with one update per batch, where the ratio is 1 anyway")
    threshold = keys.positive("seq_logprob_error_threshold")
    if threshold is not None:
        if not renormalize:
            raise keys.error(
                "seq_logprob_error_threshold",
                "it takes rows out of the denominators and seq-mask-tis leaves them in: ours does one or the other",
            )
        rules.append(RejectRule(stat=Stat.abs, reduce=Reduce.mean, high=threshold))
    config = CorrectionConfig(
        weight=weight,
        reject=rules,
        rebaseline=False,
        renormalize=renormalize,
        non_finite=NonFinite.drop if weight is NO_WEIGHT else NonFinite.zero,
    )
    return Translation(config, keys.notes)


OPENRLHF_KEYS = ("is_correction_enable", "is_correction_threshold", "is_correction_type", "policy_loss_type")
OPENRLHF_OLD = {
    "enable_vllm_is_correction": "is_correction_enable",
    "vllm_is_truncated_threshold": "is_correction_threshold",
    "vllm_is_correction_type": "is_correction_type",
}


def openrlhf(mapping: Mapping[str, Any]) -> Translation:
    values = {OPENRLHF_OLD.get(name, name): value for name, value in leaves(mapping).items()}
    keys = Keys("openrlhf", values, OPENRLHF_KEYS, strict=False)
    given = keys.given("is_correction_threshold") or keys.given("is_correction_type")
    if not keys.flag("is_correction_enable", default=given):
        return Translation(CorrectionConfig(weight=NO_WEIGHT, rebaseline=False, renormalize=False), keys.notes)
    if keys.text("policy_loss_type") == "gspo":
        keys.notes.append("with gspo OpenRLHF takes the sampler's logprobs as the anchor; goes with loss.name: gspo")
        return Translation(BYPASS, keys.notes)
    bounds = values.get("is_correction_threshold") or [0.5, 5.0]
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise keys.error("is_correction_threshold", "expected two numbers, low and high")
    low, high = (keys.as_number("is_correction_threshold", bound) for bound in bounds)
    kind = keys.choice("is_correction_type", "tis", "tis", "icepop", "seq-mask-tis")
    rules = []
    if kind == "seq-mask-tis":
        weight = WeightConfig(level=Level.token, high=None)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.mean, low=low, high=high))
    else:
        outside = Outside.zero if kind == "icepop" else Outside.truncate
        weight = WeightConfig(level=Level.token, outside=outside, low=low, high=high)
    return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False), keys.notes)


SLIME_KEYS = (
    "use_tis",
    "tis_clip",
    "tis_clip_low",
    "custom_tis_function_path",
    "use_rollout_logprobs",
    "get_mismatch_metrics",
    "use_opsm",
    "opsm_delta",
)
SLIME_MIS_KEYS = (
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
SLIME_REDUCE = {"sequence": Reduce.sum, "geometric": Reduce.mean}


def slime(mapping: Mapping[str, Any]) -> Translation:
    values = leaves(mapping)
    keys = Keys("slime", values, SLIME_KEYS + SLIME_MIS_KEYS, strict=False)
    function = keys.text("custom_tis_function_path") or ""
    uses_mis = function.endswith("compute_mis_weights_with_cp") or any(keys.given(name) for name in SLIME_MIS_KEYS)
    rules: list[RejectRule] = []
    weight = NO_WEIGHT
    by_sampler = keys.flag("use_rollout_logprobs", False)
    if keys.flag("use_tis", False):
        if by_sampler:
            raise keys.error("use_tis", "slime refuses it with use_rollout_logprobs")
        if uses_mis:
            weight, rules = _slime_mis(keys)
        elif function and not function.endswith("icepop_function"):
            raise keys.error("custom_tis_function_path", "what a custom function computes is not known here")
        else:
            low, high = keys.number("tis_clip_low", 0.0), keys.positive("tis_clip", 2.0)
            outside = Outside.zero if function else Outside.truncate
            weight = WeightConfig(level=Level.token, outside=outside, low=low or None, high=high)
    if keys.flag("use_opsm", False):
        rules.append(_opsm(keys.positive("opsm_delta", 1e-4) or 1e-4))
        if by_sampler:
            keys.notes.append("use_opsm: each micro-batch judges by the current policy, as slime does")
        else:
            keys.notes.append(
                f"use_opsm: {OPSM_NOTE.format(name='slime')}; and ours compares with the sampler, slime with the "
                "learner's own old logprobs unless use_rollout_logprobs is set"
            )
    anchor = Anchor.sampler if by_sampler else Anchor.prox
    config = CorrectionConfig(anchor=anchor, weight=weight, reject=rules, rebaseline=False, renormalize=False)
    return Translation(config, keys.notes)


def _slime_mis(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    """examples/train_infer_mismatch_helper: weights, rejection and a veto, per token, product or geometric mean."""
    levels = ("token", "sequence", "geometric")
    level = keys.choice("tis_level", "token", *levels) or "token"
    mode = keys.choice("tis_mode", "truncate", "truncate", "clip", "mask")
    high = keys.positive("tis_upper_bound", 2.0) or 2.0
    low = keys.positive("tis_lower_bound", 1.0 / high)
    rules = []
    if keys.flag("use_rs", False):
        rs_level = keys.choice("rs_level", "token", *levels) or "token"
        rs_low, rs_high = keys.positive("rs_lower_bound", low), keys.positive("rs_upper_bound", high)
        token = rs_level == "token"
        rules.append(
            RejectRule(
                level=Level.token if token else Level.sequence,
                stat=Stat.ratio,
                reduce=SLIME_REDUCE.get(rs_level),
                low=low if rs_low is None else rs_low,
                high=high if rs_high is None else rs_high,
            )
        )
        veto = keys.positive("rs_veto_threshold")
        if veto is not None:
            rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.min, low=veto))
    normalize = keys.flag("tis_batch_normalize", False)
    if normalize and (rules or mode == "mask"):
        raise keys.error("tis_batch_normalize", "with rejection slime's mean includes rejected tokens, ours never does")
    if normalize and level == "geometric":
        raise keys.error("tis_batch_normalize", "slime refuses it with tis_level geometric")
    weight = WeightConfig(
        level=Level.token if level == "token" else Level.sequence,
        aggregate=Aggregate.geometric if level == "geometric" else Aggregate.product,
        outside=Outside.zero if mode == "mask" else Outside.truncate,
        low=None if mode == "truncate" else low,
        high=high,
        normalize=normalize,
    )
    return weight, rules


FIREWORKS_KEYS = ("cap", "level", "icepop_threshold")


def fireworks(mapping: Mapping[str, Any]) -> Translation:
    outer = nested(mapping)
    inner = section(outer, "tis")
    if inner is outer:
        inner = {name: value for name, value in outer.items() if name != "anchor_logp"}
        keys = Keys("fireworks", inner, FIREWORKS_KEYS)
    else:
        keys = Keys("fireworks", inner, FIREWORKS_KEYS)
    anchor = Keys("fireworks", outer, ("anchor_logp", "tis", *FIREWORKS_KEYS), strict=False)
    keys.notes.extend(anchor.notes)
    if anchor.choice("anchor_logp", "old_policy", "old_policy", "rollout") == "rollout":
        return Translation(BYPASS, keys.notes)
    cap = keys.positive("cap", 5.0) or 5.0
    level = keys.choice("level", "token", "token", "sequence")
    band = keys.positive("icepop_threshold")
    rules = []
    if level == "sequence":
        if band is not None:
            raise keys.error("icepop_threshold", "the cookbook refuses it with level: sequence")
        keys.notes.append(
            "the cookbook clamps each log-ratio to +-20 before its mean: the same unless one exceeds that"
        )
        weight = WeightConfig(level=Level.sequence, aggregate=Aggregate.geometric, high=cap)
    elif band is None:
        weight = WeightConfig(level=Level.token, high=cap)
    elif band <= 1:
        raise keys.error("icepop_threshold", "expected a threshold above 1")
    elif cap >= band:
        weight = WeightConfig(level=Level.token, outside=Outside.zero, low=1.0 / band, high=band)
    else:
        weight = WeightConfig(level=Level.token, high=cap)
        rules.append(RejectRule(level=Level.token, stat=Stat.ratio, low=1.0 / band, high=band))
    return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False), keys.notes)
