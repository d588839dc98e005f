"""verl's `algorithm.rollout_correction` as our `correction`, read as its loss settings require."""

from contextlib import suppress
from dataclasses import replace

from megatron_rl.apps.translation.keys import NO_WEIGHT, Keys, weigh
from megatron_rl.apps.translation.settings import settings
from megatron_rl.apps.translation.table import table
from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    Level,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
)

NORMALIZE = "rollout_is_batch_normalize"
AGG = "loss_agg_mode"
DRO = "dro_beta"
AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# the section that loss_mode bypass_mode reads, under the default trainer
IN_LOSS = "actor_rollout_ref.actor.policy_loss.rollout_correction"
MODES = (
    "vanilla",
    "dppo_tv",
    "dppo_kl",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dro",
    "cispo",
    "bypass_mode",
)
# a mean over rows; loss_agg_mode is ignored
ROW_MODES = {
    "gspo": "gspo",
    "sapo": "sapo",
    "geo_mean": "gmpo",
}
STATS = {"k1": Stat.ratio, "k2": Stat.k2, "k3": Stat.k3}
RULES = {
    f"token_{name}": RejectRule(level=Level.token, stat=stat) for name, stat in STATS.items()
} | {
    f"seq_{reduce.value}_{name}": RejectRule(stat=stat, reduce=reduce)
    for reduce in (Reduce.sum, Reduce.mean, Reduce.max)
    for name, stat in STATS.items()
    if (reduce, name) != (Reduce.max, "k1")
}


def verl(keys: Keys) -> CorrectionConfig:
    if keys.apart:
        names = replace(table("verl").correction, section=IN_LOSS, beside=(), bare=False, apart=())
        _read_in_loss(keys, settings("verl", keys.apart, names))
    keys.note_if(not keys.present, "nothing")
    bypass = _bypasses(keys)
    weight = _weight(keys)
    rules = _rules(keys)
    reinforce = keys.choice("loss_type", "ppo_clip", "ppo_clip", "reinforce") == "reinforce"
    keys.refuse_if(
        keys.flag("score_centering", False) and not (bypass and reinforce),
        "score_centering",
        "verl needs bypass_mode and loss_type: reinforce with it",
    )
    corrects = bool(rules) or weight.level != Level.none
    unseen = (corrects or bypass) and not keys.flag("calculate_log_probs", True)
    keys.refuse_if(unseen, "calculate_log_probs", "no_logprobs")
    keys.note_if(any(rule.level == Level.sequence for rule in rules), "clamps")
    keys.refuse_if(keys.text(AGG) == "token-sum", AGG, "token_sum")
    keys.choice(AGG, "token-mean", *AGG_MODES)
    # which puts its loss there
    if keys.text("loss_mode") == "dro" and not (bypass and not keys.flag("use_v1", True)):
        _dro(keys, weight)
    if bypass:
        return _bypass(keys, weight, rules, reinforce)
    if corrects:
        keys.choice("loss_mode", None, *MODES, *ROW_MODES)
    keys.refuse_if(weight.normalize and rules, NORMALIZE, "normalized")
    return keys.correction(weight, rules, _renormalize(keys, rules))


def _dro(keys: Keys, weight: WeightConfig) -> None:
    """-(A pi - beta / 2 (pi - p)^2)."""
    beta = keys.positive(DRO)
    keys.refuse_if(beta is None, DRO, "verl needs a number with loss_mode: dro")
    keys.refuse_if(weight.level != Level.none, "rollout_is", "dro")
    keys.goes_with(name="reinforce", kl_to="anchor", kl_estimator="k2", kl_coef=beta)


def _read_in_loss(keys: Keys, in_loss: Keys) -> None:
    """The settings inside the loss in place of the algorithm's, where verl reads them."""
    if keys.text("loss_mode") != "bypass_mode" or not keys.flag("use_v1", True):
        keys.note("left_out")
        return
    keys.replace(in_loss, [name for name in table("verl").correction.keys if name != "bypass_mode"])
    keys.note_if(not keys.given("use_v1"), "in_loss")


def _bypasses(keys: Keys) -> bool:
    if keys.text("loss_mode") != "bypass_mode":
        return keys.flag("bypass_mode", False)
    keys.refuse_if(not keys.flag("bypass_mode", True), "loss_mode", "itself")
    keys.note_if(not keys.given("bypass_mode"), "taken")
    return True


def _bypass(
    keys: Keys, weight: WeightConfig, rules: list[RejectRule], reinforce: bool
) -> CorrectionConfig:
    """Bypass mode: verl's new trainer takes the sampler's logprobs as old ones.

    Its loss then reads its own section.
    """
    if (rules or reinforce) and not keys.replaced:
        keys.refuse_if(
            keys.flag("use_v1", False), "rollout_rs" if rules else "loss_type", "v1_ignores"
        )
        keys.note_if(not keys.given("use_v1"), "v1_default")
    _refuse_mixed_denominators(
        keys, rules, _reduction(keys) if keys.flag("use_v1", True) else keys.text(AGG)
    )
    keys.refuse_if(weight.normalize, NORMALIZE, "micro_batch")
    if reinforce:
        keys.goes_with(name="reinforce")
    elif weight.level != Level.none:
        weight = NO_WEIGHT
        keys.note("metrics")
    return keys.centered(keys.correction(weight, rules, anchor=Anchor.sampler))


def _renormalize(keys: Keys, rules: list[RejectRule]) -> bool:
    """True if rejected tokens leave verl's denominators: token-mean under its legacy trainer."""
    reduction = _reduction(keys)
    if not rules:
        return True
    _refuse_mixed_denominators(keys, rules, reduction)
    if reduction.startswith("seq-mean"):
        return False
    keys.note_if(not keys.given("use_v1"), "legacy")
    return not keys.flag("use_v1", False)


def _reduction(keys: Keys) -> str:
    """The denominator of verl's loss: some losses have a reduction of their own."""
    mode = keys.text("loss_mode")
    if mode not in ROW_MODES:
        return keys.text(AGG) or "token-mean"
    keys.note(
        "all_rows", mode=mode, micro_batch=", those of a micro-batch" if mode == "geo_mean" else ""
    )
    keys.goes_with(name=ROW_MODES[mode], reduction="seq_mean_token_mean")
    keys.note_if(mode == "gspo" and keys.text(AGG) != "seq-mean-token-mean", "old_gspo")
    return "seq-mean-token-mean"


def _refuse_mixed_denominators(keys: Keys, rules: list[RejectRule], reduction: str | None) -> None:
    mixed = reduction == "seq-mean-token-mean" and any(rule.level == Level.token for rule in rules)
    keys.refuse_if(mixed, "loss_mode" if keys.text("loss_mode") in ROW_MODES else AGG, "mixed")


def _weight(keys: Keys) -> WeightConfig:
    """A number truncates; `lo_hi` zeroes what is outside."""
    name = "rollout_is_threshold"
    level = keys.choice("rollout_is", None, "token", "sequence")
    if level is None:
        return NO_WEIGHT
    if keys.raw(name, "") is None:
        keys.note(f"verl computes no weight where {name} is null")
        return NO_WEIGHT
    text = keys.text(name) or ""
    if "_" in text:
        _note_unquoted(keys, name, text)
        low, high = (keys.as_number(name, part) for part in text.split("_", 1))
        keys.refuse_if(not 0 < low < high, name, "expected lo_hi with 0 < lo < hi")
        weight = weigh(low, high, level, mask=True)
    else:
        weight = weigh(None, keys.positive(name, 2.0), level)
    return replace(weight, normalize=keys.flag(NORMALIZE, False))


def _rules(keys: Keys) -> list[RejectRule]:
    """k1 bounds are bounds on 1/rho: they swap places and are inverted."""
    if not keys.given("rollout_rs"):
        return []
    names = list(dict.fromkeys(_words(keys, "rollout_rs")))
    for name in names or ["at all"]:
        keys.refuse_if(
            name not in RULES, "rollout_rs", f"no rule {name}; known are {', '.join(RULES)}"
        )
    bounds = _words(keys, "rollout_rs_threshold")
    _note_unquoted(keys, "rollout_rs_threshold", ",".join(bounds))
    bounds *= len(names) if len(bounds) == 1 else 1
    expected = f"expected one threshold, or {len(names)} for {', '.join(names)}"
    keys.refuse_if(len(bounds) != len(names), "rollout_rs_threshold", expected)
    return [_rule(keys, name, bound) for name, bound in zip(names, bounds, strict=True)]


def _note_unquoted(keys: Keys, name: str, text: str) -> None:
    """Two bounds that YAML may take for digits of one number."""
    with suppress(ValueError):
        keys.note_if("_" in text, "two_bounds", name=name, text=text, number=float(text))


def _words(keys: Keys, name: str) -> list[str]:
    """Words listed in YAML, or between commas."""
    value = keys.raw(name)
    if not isinstance(value, list | tuple):
        value = str(value or "").split(",")
    return [word for word in (str(each).strip() for each in value) if word]


def _rule(keys: Keys, name: str, bound: str) -> RejectRule:
    parts = [keys.as_number("rollout_rs_threshold", part) for part in bound.split("_", 1)]
    keys.refuse_if(min(parts) <= 0, "rollout_rs_threshold", "expected numbers above 0")
    if name.endswith("k1"):
        low, high = parts if len(parts) == 2 else (1.0 / parts[0], parts[0])
        keys.refuse_if(
            low >= high,
            "rollout_rs_threshold",
            f"{name} would keep nothing: {low:g} is not below {high:g}",
        )
        return replace(RULES[name], low=1.0 / high, high=1.0 / low)
    keys.refuse_if(
        len(parts) == 2, "rollout_rs_threshold", f"{name} takes one upper bound, not {bound}"
    )
    return replace(RULES[name], high=parts[0])
