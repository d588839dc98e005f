"""TRL's GRPOConfig (`vllm_importance_sampling_*`, off-policy sequence mask) as our `correction`."""

from megatron_rl.apps.translation.keys import NO_WEIGHT, Keys, opsm, weigh
from megatron_rl.apps.translation.settings import last
from megatron_rl.config.schema import Anchor, CorrectionConfig, Level, NonFinite, WeightConfig

MODE = "vllm_importance_sampling_mode"
MASK_KEY = "off_policy_mask_threshold"
LOW = "vllm_importance_sampling_clip_min"
HIGH = "vllm_importance_sampling_clip_max"
OLD_HIGH = "vllm_importance_sampling_cap"
CORRECTION = "vllm_importance_sampling_correction"
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
LOSS_LEVEL = "importance_sampling_level"
KL_KEY = "use_bias_correction_kl"
GAMMA = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}
# 0.23 to 0.25 know token truncation alone; these tell a file of a later version
SINCE_0_26 = {
    MODE,
    LOW,
    HIGH,
    KL_KEY,
    MASK_KEY,
    "num_generations_eval",
    "log_unique_prompts",
    "vllm_max_model_length",
}


def trl(keys: Keys) -> CorrectionConfig:
    undated = SINCE_0_26.isdisjoint(map(last, keys.flat))
    early = undated and keys.given(OLD_HIGH)
    weighs_kl = (
        keys.flag(KL_KEY, default=keys.given("beta") and not early) and keys.number("beta") != 0
    )
    if weighs_kl:
        keys.refuse_if(
            keys.choice(LOSS_LEVEL, "token", "token", "sequence") == "sequence", KL_KEY, "row_kl"
        )
        keys.goes_with(kl_cap=1e9, kl_estimator="k3")
    by_vllm = keys.flag("use_vllm", True)
    weight = NO_WEIGHT
    anchor = Anchor.prox
    if keys.text("loss_type") == "vespo":
        _vespo(keys, weighs_kl, by_vllm)
        anchor = Anchor.sampler
    elif by_vllm and keys.flag(CORRECTION, True):
        if early:
            weight = weigh(None, keys.positive(OLD_HIGH))
        else:
            weight = _weight(keys)
        keys.note_if(undated, "early" if early else "later")
    rules = []
    threshold = keys.positive(MASK_KEY)
    if threshold is not None:
        rules.append(opsm(threshold))
        keys.note_if(anchor == Anchor.prox, "current")
        keys.note_if(not by_vllm, "own_old")
        keys.note_kl("TRL")
    keys.note_if(weight.level == Level.sequence, "row_ratio")
    keys.taken_as_true(weight.level != Level.none, "use_vllm", "without vLLM TRL corrects nothing")
    return keys.correction(weight, rules, non_finite=NonFinite.one, anchor=anchor)


def _vespo(keys: Keys, weighs_kl: bool, by_vllm: bool) -> None:
    """A weight of its own for the row's product of both ratios, pi / old and old / sampler."""
    keys.refuse_if(not (by_vllm and keys.flag(CORRECTION, True)), "loss_type", "by_sampler")
    mode = keys.choice(MODE, None, *MODES)
    if mode == "token_mask":
        found = "leaves masked tokens in the product as 1e-8"
    else:
        found = "refuses it"
    keys.refuse_if(mode != "token_truncate", MODE, "product", found=found)
    keys.refuse_if(weighs_kl, KL_KEY, "vespo_kl")
    keys.note("bounds")
    k_pos, rate_pos, k_neg, rate_neg = (
        keys.positive(name, default) or default for name, default in GAMMA.items()
    )
    params = {"gamma_positive": [k_pos, rate_pos], "gamma_negative": [k_neg, rate_neg]}
    keys.goes_with(name="vespo", params=params)


def _weight(keys: Keys) -> WeightConfig:
    mode = keys.choice(MODE, "sequence_mask", *MODES)
    keys.refuse_if(mode is None, MODE, f"expected one of {', '.join(MODES)}")
    level, action = str(mode).split("_")
    low = keys.lower(LOW)
    high = keys.positive(OLD_HIGH) or keys.positive(HIGH, 3.0)
    if high is None and low is None:
        keys.refuse_if(
            action == "truncate", HIGH, f"TRL needs a bound with {mode}; set {HIGH} or {LOW}"
        )
        action = "truncate"
    return weigh(low, high, level, mask=action == "mask")
