"""slime's flags (TIS and its variants, MIS of its examples, off-policy sequence masking) as our `correction`."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.schema import Anchor, Level, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import (
    NO_WEIGHT,
    UNCAPPED,
    Keys,
    Native,
    Translation,
    opsm,
    ratio_rule,
    weigh,
)
from megatron_rl.workshop.translation.settings import settings

FUNCTION = "custom_tis_function_path"
PARTIAL, MASK_OLD = "partial_rollout", "mask_offpolicy_in_partial_rollout"
METRICS = "get_mismatch_metrics"
MIS = (
    "use_rs", "tis_level", "rs_level", "tis_mode", "tis_lower_bound", "tis_upper_bound", "rs_lower_bound",
    "rs_upper_bound", "rs_veto_threshold", "tis_batch_normalize",
)  # fmt: skip
LOW_VARIANCE = "low_var_kl"
LEVELS = ("token", "sequence", "geometric")
REDUCE = {"sequence": Reduce.sum, "geometric": Reduce.mean}


def slime(mapping: Native) -> Translation:
    keys = settings("slime", mapping)
    if keys.flag("use_unbiased_kl", False) and keys.flag("use_kl_loss", True):
        _unbiased_kl(keys)
    by_sampler = keys.flag("use_rollout_logprobs", False)
    if by_sampler and keys.flag("use_tis", False):
        raise keys.error("use_tis", "slime refuses it with use_rollout_logprobs")
    weight, rules = _correction(keys)
    if by_sampler and weight.level != Level.none:
        raise keys.error(METRICS, "with icepop_function slime weighs a ratio that holds the weight already")
    if keys.text("advantage_estimator") == "gspo" and any(rule.level == Level.token for rule in rules):
        keys.note_gspo("slime")
    if keys.flag("use_opsm", False):
        delta = keys.number("opsm_delta", 1e-4)
        if delta is None:
            raise keys.error("opsm_delta", "slime needs a number")
        rules.append(opsm(delta))
        if by_sampler:
            keys.note("use_opsm: each micro-batch judges by the current policy, as slime does")
        else:
            keys.note(
                "use_opsm: slime compares the learner's own old logprobs with its current ones, which rejects nothing "
                "with one update per batch; ours compares the sampler's with the proximal ones, which is slime's rule "
                "under use_rollout_logprobs"
            )
        keys.note_kl("slime", "what use_opsm, not what use_rs, rejects")
    if keys.flag(MASK_OLD, False):
        rules.insert(0, _fresh(keys))
    return keys.translation(weight, rules, anchor=Anchor.sampler if by_sampler else Anchor.prox)


def _unbiased_kl(keys: Keys) -> None:
    """Its ratio carries a gradient too, which makes k3's that of the KL itself, and of the others something else."""
    if keys.choice("kl_loss_type", "k1", "k1", "k2", "k3", LOW_VARIANCE) not in ("k3", LOW_VARIANCE):
        raise keys.error("use_unbiased_kl", "with k1 (slime's default) or k2 its gradient is another; use k3")
    if keys.text("kl_loss_type") == LOW_VARIANCE:
        keys.note(f"{LOW_VARIANCE}: slime bounds the weighed KL of a token by 10: the same unless one exceeds that")
    keys.goes_with(kl_cap=UNCAPPED, kl_estimator="k3")


def _fresh(keys: Keys) -> RejectRule:
    """Leave out what was written before the call that finished the batch."""
    if not keys.flag(PARTIAL, True):
        raise keys.error(MASK_OLD, f"slime ignores it without {PARTIAL}; set that, or leave this out")
    keys.taken_as_true(PARTIAL, "without it slime masks nothing here")
    keys.note(
        f"{MASK_OLD}: the call that completes a batch has the learner's weights in slime's train.py, and those of one "
        "update before in train_async.py: raise the rule's high to 1 for that"
    )
    keys.note("a row that is masked as a whole still counts in slime's mean over rows, not in ours")
    return RejectRule(level=Level.token, stat=Stat.staleness, high=0.0)


def _correction(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    function = keys.text(FUNCTION) or ""
    mis = [name for name in MIS if keys.given(name)]
    is_mis = function.endswith("compute_mis_weights_with_cp")
    wanted = keys.flag("use_tis", False)
    if mis and function and not is_mis:
        raise keys.error(mis[0], f"{FUNCTION} {function} does not read it")
    if is_mis and not mis and wanted:
        raise keys.error(FUNCTION, "its settings are in another file, custom_config_path; write them beside it")
    if mis and not wanted and keys.flag("use_rs", False):
        raise keys.error("use_rs", "slime rejects nothing without use_tis; set it, or leave use_rs out")
    if mis and wanted:
        if not function:
            keys.note(f"{FUNCTION} is not given and taken as that of examples/train_infer_mismatch_helper")
        return _mis(keys)
    # the metrics call the function too, and an icepop that is called is an icepop that weighs
    if not wanted and not (function and not is_mis and keys.flag(METRICS, False)):
        return NO_WEIGHT, []
    if function and not function.endswith("icepop_function"):
        raise keys.error(FUNCTION, "what a custom function computes is not known here")
    return weigh(keys.lower("tis_clip_low"), keys.positive("tis_clip", 2.0), mask=bool(function)), []


def _mis(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    """examples/train_infer_mismatch_helper: weights, rejection and a veto, per token, product or geometric mean."""
    level = keys.choice("tis_level", "token", *LEVELS) or "token"
    mode = keys.choice("tis_mode", "truncate", "truncate", "clip", "mask")
    rejects = keys.flag("use_rs", False)
    normalize = keys.flag("tis_batch_normalize", False)
    if normalize and (rejects or mode == "mask"):
        raise keys.error("tis_batch_normalize", "with rejection slime's mean includes rejected tokens, ours never does")
    if normalize and level == "geometric":
        raise keys.error("tis_batch_normalize", "slime refuses it with tis_level geometric")
    if normalize:
        keys.note("tis_batch_normalize: slime's mean is of a micro-batch, ours of the batch: the same with one")
    high = keys.positive("tis_upper_bound")
    if high is None:
        raise keys.error("tis_upper_bound", "slime needs it")
    low = keys.positive("tis_lower_bound") or 1.0 / high
    kind, low_cap = "token" if level == "token" else "sequence", None if mode == "truncate" else low
    weight = weigh(low_cap, high, kind, mask=mode == "mask", mean=level == "geometric")
    if mode == "mask":
        keys.note("tis_mode: mask: slime's reference KL and entropy leave out masked tokens, ours keep them")
    return replace(weight, normalize=normalize), _rejection(keys, low, high) if rejects else []


def _rejection(keys: Keys, low: float, high: float) -> list[RejectRule]:
    level = keys.choice("rs_level", "token", *LEVELS) or "token"
    low, high = keys.positive("rs_lower_bound") or low, keys.positive("rs_upper_bound") or high
    rules, veto = [ratio_rule(low, high, REDUCE.get(level))], keys.positive("rs_veto_threshold")
    return rules if veto is None else [*rules, ratio_rule(veto, None, Reduce.min)]
