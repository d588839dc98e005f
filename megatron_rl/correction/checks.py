"""What is wrong with a correction, loss or advantage config, said before torch is loaded.

Each check returns sentences that name the key's path, its value and the way out; an empty list is a
clean config. `check_objective` is the one to call: it includes the others and what needs two sections.
"""

from __future__ import annotations

import math
from enum import StrEnum

from megatron_rl.schema import (
    AdvantageConfig,
    Aggregate,
    Anchor,
    Config,
    CorrectionConfig,
    Divergence,
    Estimator,
    Level,
    LossConfig,
    LossName,
    NonFinite,
    Outside,
    Reduce,
    Reduction,
    RejectRule,
    Stat,
    TrustRegion,
    WeightConfig,
    When,
)

# losses whose ratio is pi over the anchor, clipped around 1
CLIPPED = (LossName.ppo, LossName.gspo, LossName.cispo, LossName.clip_cov, LossName.kl_cov, LossName.rollout_is)
DUAL_CLIPPED = (LossName.ppo, LossName.gspo, LossName.clip_cov, LossName.kl_cov)
COVARIANCE = (LossName.clip_cov, LossName.kl_cov)
WITHOUT_RATIO = (LossName.reinforce, LossName.cross_entropy)


class _Findings(list[str]):
    def add(self, path: str, value: object, way_out: str) -> None:
        self.append(f"{path} is {_say(value)}: {way_out}")

    def member(self, path: str, value: object, kind: type[StrEnum]) -> bool:
        if value in list(kind):
            return True
        self.add(path, value, f"use one of {', '.join(kind)}")
        return False

    def number(self, path: str, value: float | None) -> bool:
        """Whether there is a usable number; says so when there is an unusable one."""
        if value is None:
            return False
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.add(path, value, "give a finite number, or null for none")
            return False
        return True

    def ordered(self, path: str, low: float | None, high: float | None) -> None:
        if low is not None and high is not None and low >= high:
            self.add(f"{path}.low", low, f"it must be below {path}.high, which is {_say(high)}")


def _say(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def problems(config: Config) -> list[str]:
    """What is wrong with a whole recipe's objective."""
    return check_objective(config.correction, config.loss, config.advantage)


def check_objective(correction: CorrectionConfig, loss: LossConfig, advantage: AdvantageConfig) -> list[str]:
    """Everything about the three sections, one by one and together."""
    found = _Findings(check_correction(correction) + check_loss(loss) + check_advantage(advantage))
    by_sampler = correction.anchor == Anchor.sampler
    if by_sampler and loss.name not in WITHOUT_RATIO and correction.weight.level != Level.none:
        found.add(
            "correction.weight.level",
            correction.weight.level,
            f"with correction.anchor: sampler the ratio of loss.name: {loss.name} already holds the mismatch and a "
            "weight would count it twice; use correction.weight.level: none, or loss.name: reinforce",
        )
    if loss.name == LossName.rollout_is and not by_sampler:
        found.add("loss.name", loss.name, "its ratio is pi over the sampler; set correction.anchor: sampler")
    if loss.name in COVARIANCE and by_sampler:
        found.add(
            "loss.name",
            loss.name,
            "it selects tokens by the proximal logprobs; set correction.anchor: prox, or use ppo",
        )
    return list(found)


def check_correction(config: CorrectionConfig, path: str = "correction") -> list[str]:
    found = _Findings()
    found.member(f"{path}.anchor", config.anchor, Anchor)
    found.member(f"{path}.non_finite", config.non_finite, NonFinite)
    _check_weight(found, config.weight, f"{path}.weight")
    for place, rule in enumerate(config.reject):
        _check_rule(found, rule, f"{path}.reject[{place}]")
    if config.anchor == Anchor.sampler:
        _check_sampler_anchor(found, config, path)
    return list(found)


def _check_weight(found: _Findings, weight: WeightConfig, path: str) -> None:
    found.member(f"{path}.level", weight.level, Level)
    found.member(f"{path}.aggregate", weight.aggregate, Aggregate)
    found.member(f"{path}.outside", weight.outside, Outside)
    if found.number(f"{path}.high", weight.high) and weight.high is not None and weight.high <= 0:
        found.add(f"{path}.high", weight.high, "a cap is above 0, or null for no cap")
    if found.number(f"{path}.low", weight.low) and weight.low is not None and weight.low < 0:
        found.add(f"{path}.low", weight.low, "ratios are never negative; use 0 or more, or null for no lower bound")
    found.ordered(path, weight.low, weight.high)
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
        _check_target(found, weight, path)


def _check_target(found: _Findings, weight: WeightConfig, path: str) -> None:
    key, target = f"{path}.target_ess", weight.target_ess
    if target is None or not 0.0 < target <= 1.0:
        found.add(key, target, "it is a share of the kept tokens, above 0 and at most 1")
    if weight.outside != Outside.truncate:
        found.add(
            key, target, f"with {path}.outside: zero the sample size is not monotone in the cap; use outside: truncate"
        )
    if weight.level == Level.none:
        found.add(key, target, f"{path}.level is none, so there is no cap to solve; use token or sequence")
    if weight.high is not None and weight.high < 1.0:
        found.add(f"{path}.high", weight.high, "it is the ceiling of the solved cap, whose floor is 1; use 1 or more")
    if weight.low is not None and weight.low > 1.0:
        found.add(f"{path}.low", weight.low, "the solved cap may go down to 1; use at most 1")


def _check_rule(found: _Findings, rule: RejectRule, path: str) -> None:
    known = found.member(f"{path}.stat", rule.stat, Stat)
    if found.member(f"{path}.level", rule.level, Level) and rule.level == Level.none:
        found.add(f"{path}.level", rule.level, "a rule rejects tokens or sequences; use token or sequence")
    if rule.reduce is not None:
        found.member(f"{path}.reduce", rule.reduce, Reduce)
    if rule.when is not None:
        found.member(f"{path}.when", rule.when, When)
    if rule.level == Level.sequence and rule.reduce is None:
        found.add(f"{path}.reduce", None, f"a sequence rule needs one of {', '.join(Reduce)}")
    if rule.level == Level.token and rule.reduce is not None:
        found.add(f"{path}.reduce", rule.reduce, "a token rule reduces nothing; leave it out, or use level: sequence")
    has_low, has_high = found.number(f"{path}.low", rule.low), found.number(f"{path}.high", rule.high)
    if found.number(f"{path}.budget", rule.budget) and rule.budget is not None:
        if rule.low is not None or rule.high is not None:
            found.add(f"{path}.budget", rule.budget, "a budget sets its own bound; leave out low and high")
        if rule.when is not None:
            found.add(f"{path}.when", rule.when, "a budget looks at all tokens; leave out when, or use low / high")
        if rule.budget <= 0:
            found.add(f"{path}.budget", rule.budget, "use a number above 0, the mean that survivors may have")
    elif rule.low is None and rule.high is None:
        found.add(path, f"{_say(rule.stat)} without bounds", "give low, high or budget")
    found.ordered(path, rule.low, rule.high)
    # below these values the statistic never goes, so a bound there is a sign of a misread rule
    floor = {Stat.ratio: 0.0, Stat.k2: 0.0, Stat.k3: 0.0, Stat.m2: 0.0, Stat.abs: 1.0}.get(rule.stat) if known else None
    if floor is not None:
        if has_low and rule.low is not None and rule.low < floor:
            found.add(f"{path}.low", rule.low, f"{rule.stat} is never below {floor:g}; bounds are on the stat itself")
        if has_high and rule.high is not None and rule.high <= floor:
            found.add(f"{path}.high", rule.high, f"{rule.stat} is never below {floor:g}; bounds are on the stat itself")


def _check_sampler_anchor(found: _Findings, config: CorrectionConfig, path: str) -> None:
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


def check_loss(config: LossConfig, path: str = "loss") -> list[str]:
    found = _Findings()
    found.member(f"{path}.name", config.name, LossName)
    found.member(f"{path}.kl_estimator", config.kl_estimator, Divergence)
    found.member(f"{path}.trust_region", config.trust_region, TrustRegion)
    if config.reduction is not None:
        found.member(f"{path}.reduction", config.reduction, Reduction)
    if config.name in (LossName.gspo, LossName.gmpo) and config.reduction == Reduction.token_mean:
        found.add(
            f"{path}.reduction",
            config.reduction,
            f"{config.name} has one ratio per sequence and averages over sequences; use seq_mean_token_mean",
        )
    for key in ("clip_low", "clip_high", "kl_coef"):
        value = getattr(config, key)
        if value is None or (found.number(f"{path}.{key}", value) and value < 0):
            found.add(f"{path}.{key}", value, "use 0 or more")
    found.number(f"{path}.entropy_coef", config.entropy_coef)
    relative = config.name in CLIPPED and not config.absolute
    if relative and config.clip_low > 1:
        found.add(f"{path}.clip_low", config.clip_low, "the ratio is clipped below at 1 - clip_low; use at most 1")
    if config.absolute and config.name != LossName.cispo:
        found.add(f"{path}.absolute", True, f"only cispo caps the ratio itself; with {config.name} use false")
    if config.absolute and config.clip_high == 0:
        found.add(f"{path}.clip_high", config.clip_high, "with absolute it caps the ratio itself; use a cap above 0")
    if config.dual_clip is not None:
        if config.name not in DUAL_CLIPPED:
            names = ", ".join(DUAL_CLIPPED)
            found.add(f"{path}.dual_clip", config.dual_clip, f"only {names} have it; with {config.name} use null")
        elif found.number(f"{path}.dual_clip", config.dual_clip) and config.dual_clip <= 1:
            found.add(f"{path}.dual_clip", config.dual_clip, "it bounds the loss at dual_clip x |A|; use more than 1")
    for key in ("tau_positive", "tau_negative"):
        value = getattr(config, key)
        if found.number(f"{path}.{key}", value) and value <= 0:
            found.add(f"{path}.{key}", value, "use a temperature above 0")
    if not 0 < config.cov_fraction <= 1:
        found.add(f"{path}.cov_fraction", config.cov_fraction, "it is a share of the tokens, above 0 and at most 1")
    if config.cov_low >= config.cov_high:
        found.add(f"{path}.cov_low", config.cov_low, f"it must be below {path}.cov_high, which is {config.cov_high}")
    if config.cov_kl_coef < 0:
        found.add(f"{path}.cov_kl_coef", config.cov_kl_coef, "use 0 or more")
    return list(found)


def check_advantage(config: AdvantageConfig, path: str = "advantage") -> list[str]:
    found = _Findings()
    found.member(f"{path}.estimator", config.estimator, Estimator)
    return list(found)
