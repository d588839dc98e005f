"""verl's `algorithm.rollout_correction` as our `correction`; its loss settings decide how that is read."""

from __future__ import annotations

from dataclasses import replace

from megatron_rl.config.schema import Anchor, Level, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.workshop.translation.keys import NO_WEIGHT, Keys, Native, Translation, weigh
from megatron_rl.workshop.translation.settings import flatten, settings
from megatron_rl.workshop.translation.table import table

NORMALIZE = "rollout_is_batch_normalize"
AGG, DRO = "loss_agg_mode", "dro_beta"
AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# the section that loss_mode bypass_mode reads, under the default trainer
IN_LOSS = "actor_rollout_ref.actor.policy_loss.rollout_correction"
MODES = ("vanilla", "dppo_tv", "dppo_kl", "gpg", "clip_cov", "kl_cov", "dro", "cispo", "bypass_mode")
ROW_MODES = {"gspo": "gspo", "sapo": "sapo", "geo_mean": "gmpo"}  # a mean over rows, whatever loss_agg_mode says
STATS = {"k1": Stat.ratio, "k2": Stat.k2, "k3": Stat.k3}
RULES = {f"token_{name}": RejectRule(level=Level.token, stat=stat) for name, stat in STATS.items()} | {
    f"seq_{reduce.value}_{name}": RejectRule(stat=stat, reduce=reduce)
    for reduce in (Reduce.sum, Reduce.mean, Reduce.max)
    for name, stat in STATS.items()
    if (reduce, name) != (Reduce.max, "k1")
}


def verl(mapping: Native) -> Translation:
    flat = flatten(mapping)
    in_loss = {path: flat.pop(path) for path in list(flat) if ".policy_loss.rollout_correction." in f".{path}."}
    keys = settings("verl", flat)
    if in_loss:
        names = replace(table("verl").correction, section=IN_LOSS, beside=())
        _read_in_loss(keys, settings("verl", in_loss, names, bare=False))
    if not keys.present:
        keys.note("there is no algorithm.rollout_correction, so verl corrects nothing")
    bypass = _bypasses(keys)
    weight, rules = _weight(keys), _rules(keys)
    reinforce = keys.choice("loss_type", "ppo_clip", "ppo_clip", "reinforce") == "reinforce"
    corrects = bool(rules) or weight.level != Level.none
    if (corrects or bypass) and not keys.flag("calculate_log_probs", True):
        raise keys.error("calculate_log_probs", "verl corrects nothing without it; set it, or leave the correction out")
    if any(rule.level == Level.sequence for rule in rules):
        keys.note("verl clamps each token's log-ratio to +-20 before summing a row: the same unless one exceeds that")
    if keys.text(AGG) == "token-sum":
        raise keys.error(AGG, "our losses have no plain sum over tokens; they divide by a count (loss.reduction)")
    keys.choice(AGG, "token-mean", *AGG_MODES)
    if keys.text("loss_mode") == "dro" and not (bypass and not keys.flag("use_v1", True)):  # which puts its loss there
        _dro(keys, weight)
    if bypass:
        return _bypass(keys, weight, rules, reinforce)
    if corrects:
        keys.choice("loss_mode", None, *MODES, *ROW_MODES)
    if weight.normalize and rules:
        raise keys.error(NORMALIZE, "with rollout_rs verl's mean includes rejected tokens, ours never does")
    return keys.translation(weight, rules, _renormalize(keys, rules))


def _dro(keys: Keys, weight: WeightConfig) -> None:
    """-(A pi - beta / 2 (pi - p)^2)."""
    beta = keys.positive(DRO)
    if beta is None:
        raise keys.error(DRO, "verl needs a number with loss_mode: dro")
    if weight.level != Level.none:
        raise keys.error("rollout_is", "verl weighs dro's squared log-ratio too, ours the rest alone")
    keys.goes_with(name="reinforce", kl_to="anchor", kl_estimator="k2", kl_coef=beta)


def _read_in_loss(keys: Keys, in_loss: Keys) -> None:
    """The settings inside the loss in place of the algorithm's, where verl reads them."""
    if keys.text("loss_mode") != "bypass_mode" or not keys.flag("use_v1", True):
        keys.note(f"{IN_LOSS}: verl reads it with loss_mode: bypass_mode and trainer.use_v1 only; left out")
        return
    keys.replace(in_loss, [name for name in table("verl").correction.keys if name != "bypass_mode"])
    if not keys.given("use_v1"):
        keys.note(
            "verl's default trainer (use_v1: true) reads policy_loss.rollout_correction, as here; with use_v1: false "
            "it reads algorithm.rollout_correction instead"
        )


def _bypasses(keys: Keys) -> bool:
    if keys.text("loss_mode") != "bypass_mode":
        return keys.flag("bypass_mode", False)
    if not keys.flag("bypass_mode", True):
        why = "without algorithm.rollout_correction.bypass_mode verl compares the learner with itself; set it"
        raise keys.error("loss_mode", why)
    if not keys.given("bypass_mode"):
        said = "is not given and taken as true; without it verl compares the learner with itself"
        keys.note(f"algorithm.rollout_correction.bypass_mode {said}")
    return True


def _bypass(keys: Keys, weight: WeightConfig, rules: list[RejectRule], reinforce: bool) -> Translation:
    """verl's new trainer only takes the sampler's logprobs as old ones, its loss reads its own section."""
    if (rules or reinforce) and not keys.replaced:
        if keys.flag("use_v1", False):
            name = "rollout_rs" if rules else "loss_type"
            raise keys.error(
                name,
                "verl ignores it in bypass_mode with trainer.use_v1; leave one of the three out, or write it under "
                "policy_loss.rollout_correction, beside loss_mode: bypass_mode",
            )
        if not keys.given("use_v1"):
            keys.note("with trainer.use_v1, its default, verl ignores rollout_rs and loss_type in bypass_mode")
    _refuse_mixed_denominators(keys, rules, _reduction(keys) if keys.flag("use_v1", True) else keys.text(AGG))
    if weight.normalize:
        raise keys.error(NORMALIZE, "with bypass_mode the mean depends on the micro-batch split")
    if reinforce:
        keys.goes_with(name="reinforce")
    elif weight.level != Level.none:
        weight = NO_WEIGHT
        keys.note("verl computes rollout_is for its metrics only here: the ratio of the loss is the correction")
    return keys.translation(weight, rules, anchor=Anchor.sampler)


def _renormalize(keys: Keys, rules: list[RejectRule]) -> bool:
    """Whether rejected tokens leave verl's denominators: with token-mean, under its legacy trainer."""
    reduction = _reduction(keys)
    if not rules:
        return True
    _refuse_mixed_denominators(keys, rules, reduction)
    if reduction.startswith("seq-mean"):
        return False
    if not keys.given("use_v1"):
        keys.note(
            "verl's denominators count the tokens left, as here, with loss_agg_mode: token-mean and trainer.use_v1: "
            "false; those of its default trainer (use_v1: true) count all: set renormalize: false for that"
        )
    return not keys.flag("use_v1", False)


def _reduction(keys: Keys) -> str:
    """The denominator of verl's loss: some losses have a reduction of their own."""
    mode = keys.text("loss_mode")
    if mode not in ROW_MODES:
        return keys.text(AGG) or "token-mean"
    micro_batch = ", those of a micro-batch" if mode == "geo_mean" else ""
    keys.note(f"loss_mode {mode}: verl divides by all rows{micro_batch}, whatever {AGG} says")
    keys.goes_with(name=ROW_MODES[mode], reduction="seq_mean_token_mean")
    if mode == "gspo" and keys.text(AGG) != "seq-mean-token-mean":
        keys.note(
            f"verl 0.9.1 and before divide gspo as {AGG} says (by default token-mean), which ours cannot: there this "
            f"is the same with {AGG}: seq-mean-token-mean only"
        )
    return "seq-mean-token-mean"


def _refuse_mixed_denominators(keys: Keys, rules: list[RejectRule], reduction: str | None) -> None:
    if reduction == "seq-mean-token-mean" and any(rule.level == Level.token for rule in rules):
        raise keys.error(
            "loss_mode" if keys.text("loss_mode") in ROW_MODES else AGG,
            "with token rules verl divides a row by its tokens left, but counts all rows: ours does not",
        )


def _weight(keys: Keys) -> WeightConfig:
    """A number truncates; `lo_hi` zeroes what is outside."""
    name = "rollout_is_threshold"
    level = keys.choice("rollout_is", None, "token", "sequence")
    if level is None:
        return NO_WEIGHT
    if keys.null(name):
        keys.note(f"verl computes no weight where {name} is null")
        return NO_WEIGHT
    normalize = keys.flag(NORMALIZE, False)
    text = keys.text(name)
    if text is not None and "_" in text:
        _note_unquoted(keys, name, text)
        low, high = (keys.as_number(name, part) for part in text.split("_", 1))
        if not 0 < low < high:
            raise keys.error(name, "expected lo_hi with 0 < lo < hi")
        return replace(weigh(low, high, level, mask=True), normalize=normalize)
    return replace(weigh(None, keys.positive(name, 2.0), level), normalize=normalize)


def _rules(keys: Keys) -> list[RejectRule]:
    """k1 bounds are bounds on 1/rho: they swap places and are inverted."""
    if not keys.given("rollout_rs"):
        return []
    names = list(dict.fromkeys(_words(keys, "rollout_rs")))
    unknown = [name for name in names if name not in RULES]
    if unknown or not names:
        found = f"no rule {unknown[0]}" if unknown else "no rule"
        raise keys.error("rollout_rs", f"{found}; known are {', '.join(RULES)}")
    bounds = _words(keys, "rollout_rs_threshold")
    _note_unquoted(keys, "rollout_rs_threshold", ",".join(bounds))
    if len(bounds) == 1:
        bounds *= len(names)
    if len(bounds) != len(names):
        raise keys.error("rollout_rs_threshold", f"expected one threshold, or {len(names)} for {', '.join(names)}")
    return [_rule(keys, name, bound) for name, bound in zip(names, bounds, strict=True)]


def _note_unquoted(keys: Keys, name: str, text: str) -> None:
    """Two bounds that YAML may take for digits of one number."""
    try:
        number = float(text) if "_" in text else None
    except ValueError:
        return
    if number is not None:
        keys.note(f"{name}: {text} is read as two bounds; without quotes it is {number:g} to verl")


def _words(keys: Keys, name: str) -> list[str]:
    """Words listed in YAML, or between commas."""
    value = keys.raw(name)
    listed = value if isinstance(value, list | tuple) else (keys.text(name) or "").split(",")
    return [word for word in (str(each).strip() for each in listed) if word]


def _rule(keys: Keys, name: str, bound: str) -> RejectRule:
    parts = [keys.as_number("rollout_rs_threshold", part) for part in bound.split("_", 1)]
    if min(parts) <= 0:
        raise keys.error("rollout_rs_threshold", "expected numbers above 0")
    if name.endswith("k1"):
        low, high = parts if len(parts) == 2 else (1.0 / parts[0], parts[0])
        if low >= high:
            raise keys.error("rollout_rs_threshold", f"{name} would keep nothing: {low:g} is not below {high:g}")
        return replace(RULES[name], low=1.0 / high, high=1.0 / low)
    if len(parts) == 2:
        raise keys.error("rollout_rs_threshold", f"{name} takes one upper bound, not {bound}")
    return replace(RULES[name], high=parts[0])
