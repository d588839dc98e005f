"""Checks of a recipe's correction, loss and advantage sections, for rules.py and `translate`:
sentences with key, value and way out; whether anything corrects for the mismatch; and `Findings`,
the list that rules.py fills, too.
"""

import math
from functools import reduce
from typing import Any

from megatron_rl.config.bounds import as_written
from megatron_rl.config.choices import (
    Aggregate,
    Anchor,
    Estimator,
    KlTo,
    Level,
    Outside,
    Reduce,
    Reduction,
    Stat,
    TargetBy,
    TrustRegion,
)
from megatron_rl.config.objective import (
    AdvantageConfig,
    CorrectionConfig,
    LossConfig,
    RejectRule,
    WeightConfig,
)
from megatron_rl.config.shape import sound
from megatron_rl.loss.table import losses

BANDED = losses(lambda loss: loss.band)
OPEN_BANDED = losses(lambda loss: loss.band == "open")
CAPPED = losses(lambda loss: "absolute" in loss.reads)
DUAL_CLIPPED = losses(lambda loss: "dual_clip" in loss.reads)
SHARED = losses(lambda loss: "level" in loss.reads)
GROWING = losses(lambda loss: "clip_growth" in loss.reads)
BUDGETED = losses(lambda loss: "prefix_budget" in loss.reads)
COVARIANCE = losses(lambda loss: loss.selects)
PER_ROW = losses(lambda loss: loss.per_row)
WITH_RATIO = losses(lambda loss: loss.ratio)
AGAINST_SAMPLER = losses(lambda loss: loss.against_sampler)
SUPERVISED = losses(lambda loss: loss.supervised)
# what a statistic is never below
FLOOR = dict.fromkeys(set(Stat) - {Stat.k1, Stat.prob}, 0.0) | {Stat.abs: 1.0}


class Findings(list[str]):
    """Sentences about keys of these sections, each with its value and the way out."""

    def __init__(self, **sections: Any) -> None:
        super().__init__()
        self._sections = sections

    def value(self, key: str) -> Any:
        section, *names = key.split(".")
        return reduce(getattr, names, self._sections[section])

    def add(self, key: str, way_out: str) -> None:
        self.tell(key, self.value(key), way_out)

    def tell(self, path: str, value: object, way_out: str) -> None:
        self.append(f"{path} is {as_written(value)}: {way_out}")

    def ordered(self, path: str, low: float | None, high: float | None) -> None:
        if low is not None and high is not None and low >= high:
            self.tell(
                f"{path}.low", low, f"it must be below {path}.high, which is {as_written(high)}"
            )


def check_objective(
    correction: CorrectionConfig, loss: LossConfig, advantage: AdvantageConfig
) -> list[str]:
    """Everything about the three sections, one by one and together."""
    found = Findings(correction=correction, loss=loss)
    found += check_correction(correction) + check_loss(loss) + check_advantage(advantage)
    by_sampler = correction.anchor == Anchor.sampler
    _check_clip_by_weight(found, correction, loss)
    if by_sampler and loss.name in WITH_RATIO and correction.weight.level != Level.none:
        way_out = (
            f"with correction.anchor: sampler the ratio of loss.name: {loss.name} already holds "
            "the mismatch and a weight would count it twice; use correction.weight.level: none, "
            "or loss.name: reinforce"
        )
        found.add("correction.weight.level", way_out)
    if correction.weigh_baseline and advantage.estimator not in (Estimator.grpo, Estimator.dr_grpo):
        way_out = f"advantage.estimator: {advantage.estimator} has a baseline of its own; use grpo or dr_grpo, or false"
        found.add("correction.weigh_baseline", way_out)
    if loss.name in AGAINST_SAMPLER and not by_sampler:
        found.add("loss.name", "its ratio is pi over the sampler; set correction.anchor: sampler")
    if loss.name in COVARIANCE and correction.anchor != Anchor.prox:
        found.add(
            "loss.name",
            "it selects tokens by the proximal logprobs; set correction.anchor: prox, or use ppo",
        )
    return found


def _check_clip_by_weight(found: Findings, correction: CorrectionConfig, loss: LossConfig) -> None:
    weight = correction.weight
    if not loss.clip_by_weight or loss.name not in GROWING:
        return
    if weight.level != Level.token or weight.high is None or correction.anchor == Anchor.sampler:
        way_out = "it makes up for what a cap takes from a token's weight; set correction.weight.level: token and high"
        found.add(
            "loss.clip_by_weight", f"{way_out}, with an anchor that is not the sampler, or false"
        )
    elif weight.normalize:
        found.add(
            "loss.clip_by_weight",
            "correction.weight.normalize moves weights that no cap has touched; use false",
        )


def corrects(correction: CorrectionConfig, loss: LossConfig) -> bool:
    """Whether anything in the objective depends on how far the learner is from the sampler."""
    if correction.anchor == Anchor.sampler and loss.name in WITH_RATIO:
        return True
    return correction.weight.level != Level.none or any(
        rule.stat != Stat.staleness for rule in correction.reject
    )


def check_loss(config: LossConfig) -> list[str]:
    """Values one by one, then what two of them say together."""
    config, wrong = sound(config, "loss")
    found = Findings(loss=config)
    found += wrong.values()
    if config.name in PER_ROW and config.reduction == Reduction.token_mean:
        way_out = f"{config.name} has one ratio per sequence and averages over sequences; use seq_mean_token_mean"
        found.add("loss.reduction", way_out)
    _check_clip(found, config)
    _check_shared(found, config)
    if config.kl_cap is not None and not (config.kl_coef and config.kl_to == KlTo.reference):
        found.add(
            "loss.kl_cap",
            "it weighs the KL to the reference; set loss.kl_coef and kl_to: reference",
        )
    if config.cov_low >= config.cov_high and not {"loss.cov_low", "loss.cov_high"} & wrong.keys():
        found.add("loss.cov_low", f"it must be below loss.cov_high, which is {config.cov_high}")
    return found


def _check_clip(found: Findings, config: LossConfig) -> None:
    if config.name in BANDED and not config.absolute and config.clip_low > 1:
        found.add("loss.clip_low", "the ratio is clipped below at 1 - clip_low; use at most 1")
    if config.name in OPEN_BANDED:
        for key in ("clip_low", "clip_high"):
            if getattr(config, key) == 0:
                found.tell(
                    f"loss.{key}",
                    0,
                    "the open band ends at a ratio of 1 and drops what agrees; use above 0",
                )
    if config.absolute and config.name not in CAPPED:
        found.add(
            "loss.absolute",
            f"only {', '.join(CAPPED)} caps the ratio itself; with {config.name} use false",
        )
    if config.absolute and config.clip_high == 0:
        found.add("loss.clip_high", "with absolute it caps the ratio itself; use a cap above 0")
    if config.dual_clip is not None and config.name not in DUAL_CLIPPED:
        found.add(
            "loss.dual_clip", f"only {', '.join(DUAL_CLIPPED)} have it; with {config.name} use null"
        )


def _check_shared(found: Findings, config: LossConfig) -> None:
    _check_aggregate(found, config, "loss")
    if config.level == Level.none:
        found.add("loss.level", "a ratio is of something; use token, sequence, turn or prefix")
        return
    own = (
        ("level", Level.token, SHARED),
        ("clip_growth", 0.0, GROWING),
        ("clip_by_weight", False, GROWING),
        ("prefix_budget", None, BUDGETED),
    )
    for key, off, names in own:
        if getattr(config, key) != off and config.name not in names:
            found.add(
                f"loss.{key}", f"only {', '.join(names)} have it; leave it at {as_written(off)}"
            )
    if config.prefix_budget is not None and config.trust_region != TrustRegion.total_variation:
        found.add(
            "loss.prefix_budget",
            "it is of distances in probability; use loss.trust_region: total_variation",
        )
    if config.prefix_budget is None and config.late_weight != 1.0:
        found.add(
            "loss.late_weight",
            "it weighs what loss.prefix_budget counts, which is null; leave it at 1",
        )
    if config.clip_growth and config.absolute:
        found.add(
            "loss.clip_growth", "a cap on the ratio itself does not grow; use loss.absolute: false"
        )


def check_advantage(config: AdvantageConfig) -> list[str]:
    return list(sound(config, "advantage")[1].values())


def check_correction(config: CorrectionConfig) -> list[str]:
    """Values one by one, then what two of them say together."""
    config, wrong = sound(config, "correction")
    found = Findings(correction=config)
    found += wrong.values()
    _check_weight(found, config.weight)
    for place, rule in enumerate(config.reject):
        if not any(key.startswith(f"correction.reject[{place}]") for key in wrong):
            _check_rule(found, rule, f"correction.reject[{place}]")
    _check_current(found, config)
    if config.step_power and config.weight.level == Level.none:
        found.add(
            "correction.step_power", "correction.weight.level is none, so every weight is 1; use 0"
        )
    if config.anchor != Anchor.prox:
        _check_without_prox(found, config)
    return found


def _check_weight(found: Findings, weight: WeightConfig) -> None:
    found.ordered("correction.weight", weight.low, weight.high)
    _check_aggregate(found, weight, "correction.weight")
    if weight.level == Level.none:
        if weight.outside != Outside.truncate:
            found.add(
                "correction.weight.outside",
                "correction.weight.level is none, so there is no weight; use token",
            )
        if weight.normalize:
            found.add(
                "correction.weight.normalize",
                "correction.weight.level is none, so every weight is 1; use false",
            )
    elif weight.outside == Outside.zero and weight.low is None and weight.high is None:
        found.add(
            "correction.weight.outside",
            "nothing is outside without a bound; set correction.weight.low or high",
        )
    _check_when(found, weight)
    if weight.target_ess is not None:
        _check_target(found, weight)
    elif weight.target_by != TargetBy.cap:
        found.add(
            "correction.weight.target_by",
            "correction.weight.target_ess is null, so nothing is solved; set it",
        )


def _check_aggregate(found: Findings, config: WeightConfig | LossConfig, path: str) -> None:
    key = f"{path}.aggregate"
    aggregate = config.aggregate
    if config.level in (Level.none, Level.token) and aggregate != Aggregate.product:
        found.add(
            key, f"{path}.level: {config.level} has nothing to aggregate; leave it at product"
        )
    elif aggregate == Aggregate.min and config.level != Level.prefix:
        found.add(
            key,
            f"only a prefix has a smallest ratio before it; use product, or {path}.level: prefix",
        )


def _check_current(found: Findings, config: CorrectionConfig) -> None:
    """The loss sees what rules have left: of a row whose tokens were taken one by one not the whole
    ratio.
    """
    weight = config.weight
    if not weight.current or weight.level in (Level.none, Level.token):
        return
    whole = {Level.sequence, weight.level} - {Level.prefix}
    for place, rule in enumerate(config.reject):
        if rule.level not in whole and rule.stat != Stat.staleness:
            way_out = f"it takes tokens out of a {weight.level} before correction.weight.current sees its ratio; use"
            found.tell(
                f"correction.reject[{place}].level",
                rule.level,
                f"{way_out} {' or '.join(sorted(whole))}",
            )


def _check_when(found: Findings, weight: WeightConfig) -> None:
    """The advantages come after the weights of the whole batch are known, the policy of each update
    later still.
    """
    if weight.current and weight.level == Level.none:
        found.add(
            "correction.weight.current",
            "correction.weight.level is none, so there is no weight; use false",
        )
    for name in [name for name in ("target_ess", "normalize") if getattr(weight, name)]:
        key = f"correction.weight.{name}"
        if weight.current:
            found.add(
                "correction.weight.current",
                f"{key} is solved before the first update; leave one out",
            )
        if weight.when is not None:
            found.add(
                "correction.weight.when",
                f"advantages are not known yet where {key} is; leave one out",
            )
    if weight.when is not None and weight.level == Level.none:
        found.add(
            "correction.weight.when",
            "correction.weight.level is none, so there is no weight; leave it out",
        )


def _check_target(found: Findings, weight: WeightConfig) -> None:
    key = "correction.weight.target_ess"
    if weight.level == Level.none:
        found.add(
            key,
            "correction.weight.level is none, so there is no weight to solve for; use token or "
            "sequence",
        )
    if weight.target_by == TargetBy.mix:
        return
    if weight.outside != Outside.truncate:
        way_out = "the sample size is not monotone in the cap; use truncate or target_by: mix"
        return found.add(key, f"with correction.weight.outside: zero {way_out}")
    if weight.high is not None and weight.high < 1.0:
        found.add(
            "correction.weight.high",
            "it is the ceiling of the solved cap, whose floor is 1; use 1 or more",
        )
    if weight.low is not None and weight.low > 1.0:
        found.add("correction.weight.low", "the solved cap may go down to 1; use at most 1")


def _check_rule(found: Findings, rule: RejectRule, path: str) -> None:
    if rule.level == Level.none:
        found.tell(
            f"{path}.level",
            rule.level,
            "a rule needs something to judge; use token, sequence, turn or prefix",
        )
    elif rule.level != Level.token and rule.reduce is None:
        found.tell(f"{path}.reduce", None, f"a {rule.level} rule needs one of {', '.join(Reduce)}")
    if rule.level == Level.token and rule.reduce is not None:
        found.tell(
            f"{path}.reduce",
            rule.reduce,
            "a token rule reduces nothing; leave it out, or use level: sequence",
        )
    if rule.reduce == Reduce.arithmetic and rule.stat != Stat.ratio:
        found.tell(
            f"{path}.reduce", rule.reduce, f"only a ratio has two means; {rule.stat} takes mean"
        )
    if rule.stat == Stat.staleness:
        for key in ("when", "budget"):
            if getattr(rule, key) is not None:
                found.tell(
                    f"{path}.{key}",
                    getattr(rule, key),
                    "staleness is judged first, by bounds; leave it out",
                )
    if rule.budget is None:
        if rule.low is None and rule.high is None:
            found.tell(path, f"{as_written(rule.stat)} without bounds", "give low, high or budget")
        _check_bounds(found, rule, path)
        return
    if rule.low is not None or rule.high is not None:
        found.tell(
            f"{path}.budget", rule.budget, "a budget sets its own bound; leave out low and high"
        )
    if rule.when is not None:
        found.tell(
            f"{path}.when",
            rule.when,
            "a budget looks at all tokens; leave out when, or use low / high",
        )
    floor = FLOOR.get(rule.stat, 0.0)
    if rule.budget <= floor:
        found.tell(
            f"{path}.budget",
            rule.budget,
            f"use a number above {floor:g}, the mean that survivors may have",
        )


def _check_bounds(found: Findings, rule: RejectRule, path: str) -> None:
    """A bound where the statistic never is is a sign of a misread rule."""
    found.ordered(path, rule.low, rule.high)
    floor = FLOOR.get(rule.stat, -math.inf)
    way_out = f"{rule.stat} is never below {floor:g}; bounds are on the stat itself"
    if rule.low is not None and rule.low < floor:
        found.tell(f"{path}.low", rule.low, way_out)
    # a continuous statistic is at its floor nowhere, staleness wherever the sampler is up to date
    if rule.high is not None and (
        rule.high < floor or (rule.high == floor and rule.stat != Stat.staleness)
    ):
        found.tell(f"{path}.high", rule.high, way_out)


def _check_without_prox(found: Findings, config: CorrectionConfig) -> None:
    why = f"it needs the global batch before the loss, which correction.anchor: {config.anchor} does not have; use"
    instead = {"weight.target_ess": "null", "step_power": "0"}
    keys = "weight.normalize weight.target_ess rebaseline weigh_baseline step_power weight.current renormalize"
    for key in keys.split():
        if found.value(f"correction.{key}"):
            found.add(f"correction.{key}", f"{why} {instead.get(key, 'false')}")
    for place, rule in enumerate(config.reject):
        if rule.budget is not None:
            found.tell(f"correction.reject[{place}].budget", rule.budget, f"{why} low and high")
