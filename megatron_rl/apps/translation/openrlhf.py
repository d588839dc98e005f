"""OpenRLHF's `--algo.advantage.is_correction_*` (0.11.2, and older names) as our `correction`."""

from megatron_rl.apps.translation.keys import NO_WEIGHT, UNWEIGHTED, Keys, ratio_rule, weigh
from megatron_rl.config.schema import CorrectionConfig, Level, Reduce, RejectRule, Stat

BOUNDS = "is_correction_threshold"
LEVEL = "is_correction_level"
MODE = "is_correction_mode"
GATING = "is_correction_gating"
ENABLE = "is_correction_enable"
KIND = "is_correction_type"
FIRST_BOUND = "vllm_is_truncated_threshold"
KL_KEY = "unbiased_gradient"
KL_CAP = 10.0  # KL_IS_WEIGHT_CLIP
GATES = {"binary_kl": Stat.binary_kl, "tv": Stat.tv}
# what a scheme is called before 0.11.2, and its level and mode since
SCHEMES = {
    "tis": ("token", "clip"),
    "icepop": ("token", "mask"),
    "seq-mask-tis": ("seq", "mask"),
}


def openrlhf(keys: Keys) -> CorrectionConfig:
    if any(map(keys.given, (LEVEL, MODE, GATING))):
        scheme = _scheme(keys)
    else:
        scheme = _former_scheme(keys)
    if unbiased := keys.flag(KL_KEY, False) and keys.flag("use_loss", True):
        keys.goes_with(kl_cap=KL_CAP)
    if scheme is None:
        return keys.correction(NO_WEIGHT)
    if keys.choice("policy_loss_type", "ppo", "ppo", "gspo") == "gspo":
        keys.refuse_if(
            unbiased,
            KL_KEY,
            "OpenRLHF weighs by pi over its old policy, ours with gspo over the sampler",
        )
        keys.note("anchor_gspo")
        keys.goes_with(name="gspo")
        return keys.bypass()
    level, mode = scheme
    low, high = _bounds(keys)
    if (gating := keys.text(GATING)) in GATES:
        return _gated(keys, level, gating, low, high)
    if level == "token":
        return keys.correction(weigh(low, high, mask=mode == "mask"))
    keys.note_kl("OpenRLHF")
    return keys.correction(UNWEIGHTED, [ratio_rule(low, high, Reduce.mean)])


def _scheme(keys: Keys) -> tuple[str, str] | None:
    """Level and mode as 0.11.2 has them; none where the correction is off."""
    for name in (ENABLE, KIND):
        keys.refuse_if(keys.given(name), name, "versions")
    if keys.raw(LEVEL) is False:  # the word off, as YAML reads it
        return None
    keys.refuse_if(keys.text(LEVEL) == "geo", LEVEL, "geo")
    level = keys.choice(LEVEL, "off", "off", "token", "seq")
    keys.note_if(not keys.given(LEVEL), "by_default")
    if level in (None, "off"):
        return None
    mode = keys.choice(MODE, "mask", "mask", "clip") or "mask"
    keys.refuse_if(level == "seq" and mode == "clip", MODE, f"OpenRLHF refuses it with {LEVEL} seq")
    gated = keys.choice(GATING, "ratio", "ratio", *GATES) in GATES
    keys.refuse_if(
        gated and mode == "clip", MODE, f"OpenRLHF refuses it with {GATING} {keys.text(GATING)}"
    )
    return str(level), mode


def _gated(keys: Keys, level: str, gating: str, low: float | None, high: float) -> CorrectionConfig:
    """Reject tokens, or rows by their mean, that moved too far; weigh the others by their ratio."""
    keys.refuse_if(low is not None or not keys.given(BOUNDS), BOUNDS, "upper_alone", gating=gating)
    keys.note_kl("OpenRLHF")
    keys.note_if(gating == "binary_kl", "within")
    kind, reduce = (Level.sequence, Reduce.mean) if level == "seq" else (Level.token, None)
    return keys.correction(
        UNWEIGHTED, [RejectRule(level=kind, stat=GATES[gating], reduce=reduce, high=high)]
    )


def _former_scheme(keys: Keys) -> tuple[str, str] | None:
    keys.refuse_if(
        keys.given(BOUNDS) and not keys.given(ENABLE) and not keys.given(KIND), BOUNDS, "alone"
    )
    kind = keys.choice(KIND, "tis", *SCHEMES) or "tis"
    keys.taken_as_true(keys.given(KIND), ENABLE, "without it OpenRLHF corrects nothing")
    if keys.flag(ENABLE, default=keys.given(KIND)):
        return SCHEMES[kind]
    return None


def _bounds(keys: Keys) -> tuple[float | None, float]:
    """A pair, or the two words of the flag; a single number is the upper one where allowed."""
    bounds = keys.raw(BOUNDS)
    if bounds is None:
        return 0.5, 5.0
    if isinstance(bounds, str):
        bounds = bounds.split()
    words = bounds if isinstance(bounds, list | tuple) else [bounds]
    single = keys.given(LEVEL) or keys.given(FIRST_BOUND)
    several = "two numbers, low and high" + ", or high alone" * single
    keys.refuse_if(
        len(words) != 2 and not (single and len(words) == 1), BOUNDS, f"expected {several}"
    )
    numbers = [keys.as_number(BOUNDS, word) for word in words]
    keys.refuse_if(numbers[0] < 0, BOUNDS, "ratios are never negative")
    low, high = [0.0, *numbers][-2:]
    return low or None, high
