"""NeMo-RL's ClippedPGLossConfig (`loss_fn`), `seq_logprob_error_threshold` as our `correction`."""

from megatron_rl.apps.translation.keys import NO_WEIGHT, UNWEIGHTED, Keys, ratio_rule, weigh
from megatron_rl.config.schema import (
    CorrectionConfig,
    NonFinite,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)

CORRECTION = "use_importance_sampling_correction"
ERROR_KEY = "seq_logprob_error_threshold"
KIND = "truncated_importance_sampling_type"
HIGH = "truncated_importance_sampling_ratio"
LOW = "truncated_importance_sampling_ratio_min"
PER_SEQUENCE = "sequence_level_importance_ratios"
KL_KEY = "use_on_policy_kl_approximation"
PENALTY = "reference_policy_kl_penalty"
KL_TYPE = "reference_policy_kl_type"


def nemo_rl(keys: Keys) -> CorrectionConfig:
    return keys.centered(_uncentered(keys))


def _uncentered(keys: Keys) -> CorrectionConfig:
    penalty = keys.number(PENALTY)
    keys.refuse_if(keys.flag(KL_KEY, False) and penalty != 0, KL_KEY, "on_policy_kl")
    if penalty and not keys.flag("use_kl_in_reward", False):
        keys.refuse_if(keys.choice(KL_TYPE, "k3", "k1", "k2", "k3") != "k3", KL_TYPE, "gradient")
        keys.note("k2")
        keys.goes_with(kl_estimator="k2")
    weight, rules = _weight(keys)
    keys.note_if(keys.flag("force_on_policy_ratio", False), "one_update")
    threshold = keys.positive(ERROR_KEY)
    if threshold is None:
        return keys.correction(weight, rules, renormalize=not rules, non_finite=NonFinite.zero)
    keys.refuse_if(rules, ERROR_KEY, "denominators")
    rules = [RejectRule(stat=Stat.abs, reduce=Reduce.mean, high=threshold)]
    # a row's error that is NaN is above any threshold
    return keys.correction(weight, rules, renormalize=True, non_finite=NonFinite.reject)


def _weight(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    kind = keys.choice(KIND, None, "tis", "icepop", "seq-mask-tis")
    high = keys.positive(HIGH)
    low = keys.lower(LOW)
    per_sequence = keys.flag(PER_SEQUENCE, False)
    keys.refuse_if(kind is None and high is not None, HIGH, f"NeMo-RL needs {KIND} with it")
    keys.taken_as_true(kind is not None, CORRECTION, f"NeMo-RL refuses {KIND} without it")
    if not keys.flag(CORRECTION, default=kind is not None):
        keys.refuse_if(kind is not None, KIND, f"NeMo-RL needs {CORRECTION}: true with it")
        return NO_WEIGHT, []
    keys.refuse_if(kind is not None and high is None, HIGH, f"{KIND} {kind} needs it")
    keys.refuse_if(
        kind in ("icepop", "seq-mask-tis") and not keys.given(LOW), LOW, f"{KIND} {kind} needs it"
    )
    faulty = "the row" if per_sequence else "it"
    if kind == "tis" and low:
        floor = f", in NeMo-RL {faulty} has {LOW}"
    else:
        floor = f", {faulty} in NeMo-RL" * per_sequence
    # which an error above its threshold rejects
    keys.note_if(
        not keys.given(ERROR_KEY), f"a token without a sampler logprob has weight 0{floor}"
    )
    if kind == "seq-mask-tis":
        keys.refuse_if(per_sequence, KIND, f"NeMo-RL refuses it with {PER_SEQUENCE}")
        keys.note_kl("NeMo-RL")
        return UNWEIGHTED, [ratio_rule(low, high, Reduce.mean)]
    level = "sequence" if per_sequence else "token"
    return weigh(None if kind is None else low, high, level, mask=kind == "icepop"), []
