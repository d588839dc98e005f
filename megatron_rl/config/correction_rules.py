"""Checks of a recipe's correction, loss and advantage sections, for rules.py and `translate`:
errors with key, value and hint; `corrects`; and `Findings`, the list of errors.
"""

import math
from functools import reduce
from typing import Any

from megatron_rl.config.bounds import as_written, did_you_mean
from megatron_rl.config.choices import (
    Aggregate,
    Anchor,
    Center,
    Level,
    Outside,
    Reduce,
    Reduction,
    Stat,
)
from megatron_rl.config.objective import (
    CorrectionConfig,
    LossConfig,
    LossParams,
    RejectRule,
    WeightConfig,
)
from megatron_rl.config.shape import sanitize, schema_errors
from megatron_rl.loss.table import LOSSES, losses

SHARED = losses(lambda loss: "level" in loss.reads)
ELEMENTWISE = losses(lambda loss: loss.elementwise)
# smallest value of a statistic
FLOOR = dict.fromkeys(set(Stat) - {Stat.k1}, 0.0) | {Stat.abs: 1.0}


class Findings(list[str]):
    """List of error messages, each with a key of these sections, its value and a hint."""

    def __init__(self, **sections: Any) -> None:
        super().__init__()
        self._sections = sections

    def value(self, key: str) -> Any:
        section, *names = key.split(".")
        return reduce(getattr, names, self._sections[section])

    def add(self, key: str, hint: str) -> None:
        self.add_value(key, self.value(key), hint)

    def add_value(self, path: str, value: object, hint: str) -> None:
        self.append(f"{path} is {as_written(value)}: {hint}")

    def ordered(self, path: str, low: float | None, high: float | None) -> None:
        if low is not None and high is not None and low >= high:
            self.add_value(
                f"{path}.low", low, f"it must be below {path}.high, which is {as_written(high)}"
            )


def check_objective(correction: CorrectionConfig, loss: LossConfig) -> list[str]:
    """Check both sections, first separately and then together."""
    found = Findings(correction=correction, loss=loss)
    found += check_correction(correction) + check_loss(loss)
    loss, _ = sanitize(loss, "loss")
    by_sampler = correction.anchor == Anchor.sampler
    formula = LOSSES[loss.name]
    if by_sampler and formula.ratio and correction.weight.level != Level.none:
        found.add(
            "correction.weight.level",
            f"with correction.anchor: sampler the ratio of loss.name: {loss.name} already holds "
            "the mismatch; use none, or loss.name: reinforce",
        )
    if formula.against_sampler and not by_sampler:
        found.add("loss.name", "its ratio is pi over the sampler; set correction.anchor: sampler")
    if formula.selects and correction.anchor != Anchor.prox:
        found.add("loss.name", "it selects by the proximal logprobs; set correction.anchor: prox")
    if correction.center != Center.none:
        _check_center(found, correction, loss)
    return found


def _check_center(found: Findings, correction: CorrectionConfig, loss: LossConfig) -> None:
    """Check that each top token has a coefficient of its own, known from its logprobs alone."""
    with_center = f"correction.center: {correction.center}"
    if loss.name not in ELEMENTWISE:
        found.add(
            "loss.name",
            f"{with_center} needs a loss of each token's own logprobs; use one of "
            f"{', '.join(ELEMENTWISE)}, or correction.center: none",
        )
    if loss.level != Level.token:
        found.add("loss.level", f"{with_center} needs a ratio of each token; use token")
    if correction.anchor == Anchor.interpolated:
        found.add(
            "correction.anchor",
            f"{with_center} has no anchor between two policies for tokens that were not sampled; use "
            "prox",
        )
    if correction.anchor == Anchor.sampler and correction.weight.level != Level.none:
        found.add(
            "correction.weight.level",
            f"with {with_center} and correction.anchor: sampler it would weigh by the current policy; "
            "use none, or correction.anchor: prox",
        )
    for place, rule in enumerate(correction.reject):
        if rule.level == Level.prefix and rule.budget is not None:
            found.add_value(
                f"correction.reject[{place}].budget",
                rule.budget,
                f"{with_center} needs the bounds of a prefix rule; use low and high",
            )


def corrects(correction: CorrectionConfig, loss: LossConfig) -> bool:
    """True if the objective depends on how far the learner is from the sampler."""
    if correction.anchor == Anchor.sampler and LOSSES[loss.name].ratio:
        return True
    return correction.weight.level != Level.none or any(
        rule.stat != Stat.staleness for rule in correction.reject
    )


def check_loss(config: LossConfig) -> list[str]:
    """Check each value, then combinations of values."""
    config, wrong = sanitize(config, "loss")
    found = Findings(loss=config)
    found += wrong
    if LOSSES[config.name].per_row and config.reduction == Reduction.token_mean:
        found.add(
            "loss.reduction", f"{config.name} averages over sequences; use seq_mean_token_mean"
        )
    if config.kl_cap is not None and not config.needs_reference:
        found.add("loss.kl_cap", "it weighs the KL to the reference; set loss.kl_coef")
    if config.level != Level.token and config.name not in SHARED:
        found.add("loss.level", f"only {', '.join(SHARED)} have it; leave it at token")
    _check_aggregate(found, config, "loss")
    _check_clip(found, config)
    _check_params(found, config)
    return found


def _check_clip(found: Findings, config: LossConfig) -> None:
    absolute = config.params.get("absolute")
    band = LOSSES[config.name].band
    if band and not absolute and config.clip_low > 1:
        found.add("loss.clip_low", "the ratio is clipped below at 1 - clip_low; use at most 1")
    if band == "open" and config.clip_low == 0:
        found.add("loss.clip_low", "the open band would end at a ratio of 1; use above 0")
    if config.clip_high == 0 and (absolute or band == "open"):
        found.add("loss.clip_high", "no ratio would be left; use above 0")


def _check_params(found: Findings, config: LossConfig) -> None:
    """Check that `loss.params` holds parameters of the chosen loss, with valid values."""
    known = LOSSES[config.name].params
    problems: list[str] = []
    for name, value in config.params.items():
        if name in known:
            problems += schema_errors({name: value}, LossParams, "loss.params.")
            continue
        hint = (
            did_you_mean(name, known, "did you mean loss.params.{}?")
            or f"those of loss.name: {config.name} are {', '.join(known) or 'none'}; set a parameter "
            "of another loss to its default"
        )
        problems.append(f"loss.params.{name}: unknown key; {hint}")
    if not problems and {"cov_low", "cov_high"} <= set(known):
        low = config.params["cov_low"]
        high = config.params["cov_high"]
        if low >= high:
            found.add_value(
                "loss.params.cov_low", low, f"it must be below cov_high, which is {high}"
            )
    found += problems


def check_correction(config: CorrectionConfig) -> list[str]:
    """Check each value, then combinations of values."""
    config, wrong = sanitize(config, "correction")
    found = Findings(correction=config)
    found += wrong
    _check_weight(found, config.weight)
    for place, rule in enumerate(config.reject):
        _check_rule(found, rule, f"correction.reject[{place}]")
    if config.anchor != Anchor.prox:
        _check_without_prox(found, config)
    return found


def _check_weight(found: Findings, weight: WeightConfig) -> None:
    found.ordered("correction.weight", weight.low, weight.high)
    _check_aggregate(found, weight, "correction.weight")
    zero = weight.outside == Outside.zero
    if weight.level == Level.none:
        for key in ("target_ess", "normalize"):
            if getattr(weight, key):
                found.add(f"correction.weight.{key}", "with level: none every weight is 1")
    unbounded = (weight.low, weight.high, weight.cap.confidence) == (None, None, None)
    if zero and (weight.level == Level.none or unbounded):
        found.add("correction.weight.outside", "nothing is outside; set a level, low or high")
    if weight.cap.confidence is not None:
        _check_cap(found, weight)
    if weight.target_ess is None:
        return
    if zero:
        found.add(
            "correction.weight.target_ess",
            "with outside: zero the sample size is not monotone in the cap; use truncate",
        )
    if weight.high is not None and weight.high < 1.0:
        found.add("correction.weight.high", "the solved cap is 1 at least; use 1 or more")
    if weight.low is not None and weight.low > 1.0:
        found.add("correction.weight.low", "the solved cap may go down to 1; use at most 1")


def _check_cap(found: Findings, weight: WeightConfig) -> None:
    by_confidence = f"correction.weight.cap.confidence: {weight.cap.confidence:g} is the cap"
    for key in ("high", "target_ess"):
        if getattr(weight, key) is not None:
            found.add(f"correction.weight.{key}", f"{by_confidence}; use null")
    if weight.level != Level.token:
        found.add("correction.weight.level", f"{by_confidence} of a token's own weight; use token")
    if weight.low is not None and weight.low > 1.0:
        found.add("correction.weight.low", f"{by_confidence} and may go down to 1; use at most 1")


def _check_aggregate(found: Findings, config: WeightConfig | LossConfig, path: str) -> None:
    if config.level in (Level.none, Level.token) and config.aggregate != Aggregate.product:
        found.add(
            f"{path}.aggregate",
            f"{path}.level: {config.level} has nothing to aggregate; leave it at product",
        )


def _check_rule(found: Findings, rule: RejectRule, path: str) -> None:
    if rule.level != Level.token and rule.reduce is None:
        found.add_value(
            f"{path}.reduce", None, f"a {rule.level} rule needs one of {', '.join(Reduce)}"
        )
    if rule.level == Level.token and rule.reduce is not None:
        found.add_value(f"{path}.reduce", rule.reduce, "a token rule reduces nothing; leave it out")
    if rule.budget is None and rule.low is None and rule.high is None:
        found.add_value(path, f"{as_written(rule.stat)} without bounds", "give low, high or budget")
    if rule.stat == Stat.staleness:
        for key in ("when", "budget"):
            value = getattr(rule, key)
            if value is not None:
                found.add_value(f"{path}.{key}", value, "staleness has bounds alone; leave it out")
    elif rule.budget is not None:
        _check_budget(found, rule, path)
    _check_bounds(found, rule, path)


def _check_budget(found: Findings, rule: RejectRule, path: str) -> None:
    for key in ("low", "high", "when"):
        value = getattr(rule, key)
        if value is not None:
            found.add_value(f"{path}.{key}", value, "a budget judges all tokens by its own bound")
    floor = FLOOR.get(rule.stat, 0.0)
    if rule.budget is not None and rule.budget <= floor:
        found.add_value(f"{path}.budget", rule.budget, f"use a number above {floor:g}")


def _check_bounds(found: Findings, rule: RejectRule, path: str) -> None:
    """Report bounds outside the range of the statistic: such a rule was misread."""
    found.ordered(path, rule.low, rule.high)
    floor = FLOOR.get(rule.stat, -math.inf)
    hint = f"{rule.stat} is never below {floor:g}; bounds are on the stat itself"
    if rule.low is not None and rule.low < floor:
        found.add_value(f"{path}.low", rule.low, hint)
    # a continuous statistic never equals its minimum; staleness does if the sampler is up to date
    empty = rule.high == floor and rule.stat != Stat.staleness
    if rule.high is not None and (rule.high < floor or empty):
        found.add_value(f"{path}.high", rule.high, hint)


def _check_without_prox(found: Findings, config: CorrectionConfig) -> None:
    why = f"it needs the whole batch before the loss, without anchor: {config.anchor}; use"
    for key in ("weight.normalize", "weight.target_ess", "rebaseline", "renormalize"):
        if found.value(f"correction.{key}"):
            off = "null" if key == "weight.target_ess" else "false"
            found.add(f"correction.{key}", f"{why} {off}")
    for place, rule in enumerate(config.reject):
        if rule.budget is not None:
            found.add_value(
                f"correction.reject[{place}].budget", rule.budget, f"{why} low and high"
            )
