"""What is wrong with a `correction` section: weights, reject rules, and what `anchor: sampler` cannot have."""

from __future__ import annotations

import math
from collections.abc import Iterable

from megatron_rl.config.schema import (
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
from megatron_rl.config.shape import say

# what a statistic is never below
FLOOR = {Stat.ratio: 0.0, Stat.k2: 0.0, Stat.k3: 0.0, Stat.m2: 0.0, Stat.abs: 1.0}


class Findings(list[str]):
    def add(self, path: str, value: object, way_out: str) -> None:
        self.append(f"{path} is {say(value)}: {way_out}")

    def member(self, path: str, value: object, known: Iterable[str]) -> bool:
        if value in list(known):
            return True
        self.add(path, value, f"use one of {', '.join(known)}")
        return False

    def number(self, path: str, value: float | None, *, optional: bool = True) -> bool:
        """Whether there is a usable number; says so when there is an unusable one."""
        if value is None and optional:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.add(path, value, "give a finite number" + (", or null for none" if optional else ""))
            return False
        return True

    def ordered(self, path: str, low: float | None, high: float | None) -> None:
        if low is not None and high is not None and low >= high:
            self.add(f"{path}.low", low, f"it must be below {path}.high, which is {say(high)}")


def unknown_words(config: CorrectionConfig, path: str = "correction") -> Findings:
    """Text that is no member of its key's enum, and would pass for another member where it is compared."""
    found = Findings()
    found.member(f"{path}.anchor", config.anchor, Anchor)
    found.member(f"{path}.non_finite", config.non_finite, NonFinite)
    found.member(f"{path}.weight.level", config.weight.level, Level)
    found.member(f"{path}.weight.aggregate", config.weight.aggregate, Aggregate)
    found.member(f"{path}.weight.outside", config.weight.outside, Outside)
    for place, rule in enumerate(config.reject):
        found.member(f"{path}.reject[{place}].stat", rule.stat, Stat)
        found.member(f"{path}.reject[{place}].level", rule.level, Level)
        if rule.reduce is not None:
            found.member(f"{path}.reject[{place}].reduce", rule.reduce, Reduce)
        if rule.when is not None:
            found.member(f"{path}.reject[{place}].when", rule.when, When)
    return found


def check_correction(config: CorrectionConfig, path: str = "correction") -> list[str]:
    found = unknown_words(config, path)
    _check_weight(found, config.weight, f"{path}.weight")
    for place, rule in enumerate(config.reject):
        _check_rule(found, rule, f"{path}.reject[{place}]")
    if config.anchor == Anchor.sampler:
        _check_sampler_anchor(found, config, path)
    return list(found)


def _check_weight(found: Findings, weight: WeightConfig, path: str) -> None:
    high = weight.high if found.number(f"{path}.high", weight.high) else None
    low = weight.low if found.number(f"{path}.low", weight.low) else None
    if high is not None and high <= 0:
        found.add(f"{path}.high", high, "a cap is above 0, or null for no cap")
    if low is not None and low < 0:
        found.add(f"{path}.low", low, "ratios are never negative; use 0 or more, or null for no lower bound")
    found.ordered(path, low, high)
    if weight.level != Level.sequence and weight.aggregate != Aggregate.product:
        found.add(f"{path}.aggregate", weight.aggregate, f"only {path}.level: sequence aggregates; leave it at product")
    if weight.level == Level.none:
        if weight.outside != Outside.truncate:
            found.add(f"{path}.outside", weight.outside, f"{path}.level is none, so there is no weight; use token")
        if weight.normalize:
            found.add(f"{path}.normalize", True, f"{path}.level is none, so every weight is 1; use false")
    elif weight.outside == Outside.zero and weight.low is None and weight.high is None:
        found.add(f"{path}.outside", weight.outside, f"nothing is outside without a bound; set {path}.low or high")
    if found.number(f"{path}.target_ess", weight.target_ess):
        _check_target(found, weight, low, high, path)


def _check_target(found: Findings, weight: WeightConfig, low: float | None, high: float | None, path: str) -> None:
    key, target = f"{path}.target_ess", weight.target_ess
    if target is None or not 0.0 < target <= 1.0:
        found.add(key, target, "it is a share of the kept tokens, above 0 and at most 1")
    if weight.outside != Outside.truncate:
        found.add(
            key, target, f"with {path}.outside: zero the sample size is not monotone in the cap; use outside: truncate"
        )
    if weight.level == Level.none:
        found.add(key, target, f"{path}.level is none, so there is no cap to solve; use token or sequence")
    if weight.outside == Outside.truncate and high is not None and high < 1.0:
        found.add(f"{path}.high", high, "it is the ceiling of the solved cap, whose floor is 1; use 1 or more")
    if weight.outside == Outside.truncate and low is not None and low > 1.0:
        found.add(f"{path}.low", low, "the solved cap may go down to 1; use at most 1")


def _check_rule(found: Findings, rule: RejectRule, path: str) -> None:
    known = rule.stat in list(Stat)
    if rule.level == Level.none:
        found.add(f"{path}.level", rule.level, "a rule rejects tokens or sequences; use token or sequence")
    if rule.level == Level.sequence and rule.reduce is None:
        found.add(f"{path}.reduce", None, f"a sequence rule needs one of {', '.join(Reduce)}")
    if rule.level == Level.token and rule.reduce is not None:
        found.add(f"{path}.reduce", rule.reduce, "a token rule reduces nothing; leave it out, or use level: sequence")
    budget = rule.budget if found.number(f"{path}.budget", rule.budget) else None
    if rule.budget is None:
        if rule.low is None and rule.high is None:
            found.add(path, f"{say(rule.stat)} without bounds", "give low, high or budget")
        if known:
            _check_bounds(found, rule, path)
        return
    if rule.low is not None or rule.high is not None:
        found.add(f"{path}.budget", rule.budget, "a budget sets its own bound; leave out low and high")
    if rule.when is not None:
        found.add(f"{path}.when", rule.when, "a budget looks at all tokens; leave out when, or use low / high")
    floor = FLOOR.get(rule.stat, 0.0) if known else 0.0
    if budget is not None and budget <= floor:
        found.add(f"{path}.budget", budget, f"use a number above {floor:g}, the mean that survivors may have")


def _check_bounds(found: Findings, rule: RejectRule, path: str) -> None:
    """A bound where the statistic never is is a sign of a misread rule."""
    low = rule.low if found.number(f"{path}.low", rule.low) else None
    high = rule.high if found.number(f"{path}.high", rule.high) else None
    found.ordered(path, low, high)
    floor = FLOOR.get(rule.stat, -math.inf)
    way_out = f"{rule.stat} is never below {floor:g}; bounds are on the stat itself"
    if low is not None and low < floor:
        found.add(f"{path}.low", low, way_out)
    if high is not None and high <= floor:
        found.add(f"{path}.high", high, way_out)


def _check_sampler_anchor(found: Findings, config: CorrectionConfig, path: str) -> None:
    why = f"it needs the global batch before the loss, which {path}.anchor: sampler does not have; use"
    if config.weight.normalize:
        found.add(f"{path}.weight.normalize", True, f"{why} false")
    if config.weight.target_ess is not None:
        found.add(f"{path}.weight.target_ess", config.weight.target_ess, f"{why} null")
    if config.rebaseline:
        found.add(f"{path}.rebaseline", True, f"{why} false")
    if config.renormalize:
        found.add(f"{path}.renormalize", True, f"{why} false")
    for place, rule in enumerate(config.reject):
        if rule.budget is not None:
            found.add(f"{path}.reject[{place}].budget", rule.budget, f"{why} low and high")
