"""NeMo-RL's ClippedPGLossConfig (`loss_fn`) and `seq_logprob_error_threshold` as our `correction`."""

from __future__ import annotations

from megatron_rl.config.schema import NonFinite, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import NO_WEIGHT, UNWEIGHTED, Keys, Native, Translation, ratio_rule, weigh
from megatron_rl.workshop.translation.settings import settings

CORRECTION, ERROR_KEY = "use_importance_sampling_correction", "seq_logprob_error_threshold"
KIND = "truncated_importance_sampling_type"
HIGH, LOW = "truncated_importance_sampling_ratio", "truncated_importance_sampling_ratio_min"
PER_SEQUENCE, KL_KEY = "sequence_level_importance_ratios", "use_on_policy_kl_approximation"
PENALTY, KL_TYPE = "reference_policy_kl_penalty", "reference_policy_kl_type"


def nemo_rl(mapping: Native) -> Translation:
    keys = settings("nemo_rl", mapping)
    penalty = keys.number(PENALTY)
    if keys.flag(KL_KEY, False) and penalty != 0:
        raise keys.error(KL_KEY, "NeMo-RL weighs by pi over the sampler, ours by pi over the proximal policy")
    if penalty and not keys.flag("use_kl_in_reward", False):
        if keys.choice(KL_TYPE, "k3", "k1", "k2", "k3") != "k3":
            raise keys.error(KL_TYPE, "NeMo-RL's gradient goes through the probability of sampling too, ours not")
        keys.note(
            f"{PENALTY}: through the probability of sampling, NeMo-RL's k3 has the gradient of our k2; it bounds a "
            "token's KL by kl_output_clamp_value, 10: the same unless one exceeds that"
        )
        keys.goes_with(kl_estimator="k2")
    weight, rules = _weight(keys)
    renormalize = not rules
    if keys.flag("force_on_policy_ratio", False):
        keys.note("force_on_policy_ratio: the same with one update per batch, where the ratio is 1 anyway")
    threshold = keys.positive(ERROR_KEY)
    if threshold is not None:
        if not renormalize:
            why = "it takes rows out of the denominators and seq-mask-tis leaves them in: ours does one or the other"
            raise keys.error(ERROR_KEY, why)
        rules.append(RejectRule(stat=Stat.abs, reduce=Reduce.mean, high=threshold))
    # a row's error that is NaN is above any threshold
    non_finite = NonFinite.zero if threshold is None else NonFinite.reject
    return keys.translation(weight, rules, renormalize, non_finite=non_finite)


def _weight(keys: Keys) -> tuple[WeightConfig, list[RejectRule]]:
    kind = keys.choice(KIND, None, "tis", "icepop", "seq-mask-tis")
    high, low = keys.positive(HIGH), keys.lower(LOW)
    per_sequence = keys.flag(PER_SEQUENCE, False)
    if kind is None and high is not None:
        raise keys.error(HIGH, f"NeMo-RL needs {KIND} with it")
    if kind is not None:
        keys.taken_as_true(CORRECTION, f"NeMo-RL refuses {KIND} without it")
    if not keys.flag(CORRECTION, default=kind is not None):
        if kind is not None:
            raise keys.error(KIND, f"NeMo-RL needs {CORRECTION}: true with it")
        return NO_WEIGHT, []
    if kind is not None and high is None:
        raise keys.error(HIGH, f"{KIND} {kind} needs it")
    if kind in ("icepop", "seq-mask-tis") and not keys.given(LOW):
        raise keys.error(LOW, f"{KIND} {kind} needs it")
    faulty = "the row" if per_sequence else "it"
    floor = f", in NeMo-RL {faulty} has {LOW}" if kind == "tis" and low else f", {faulty} in NeMo-RL" * per_sequence
    if not keys.given(ERROR_KEY):  # which rejects the row
        keys.note(f"a token without a sampler logprob has weight 0{floor}")
    if kind == "seq-mask-tis":
        if per_sequence:
            raise keys.error(KIND, f"NeMo-RL refuses it with {PER_SEQUENCE}")
        keys.note_kl("NeMo-RL")
        return UNWEIGHTED, [ratio_rule(low, high, Reduce.mean)]
    level = "sequence" if per_sequence else "token"
    return weigh(None if kind is None else low, high, level, mask=kind == "icepop"), []
