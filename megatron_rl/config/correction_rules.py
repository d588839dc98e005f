"""What is wrong with a correction, loss or advantage config, said before torch is loaded.

Each check returns sentences that name the key's path, its value and the way out; an empty list is a
clean config. `problems` is the one to call: it includes the others and what needs two sections.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args, get_type_hints

from megatron_rl.config.correction_values import Findings, check_correction
from megatron_rl.config.schema import (
    GROUP_ESTIMATORS,
    AdvantageConfig,
    Anchor,
    Config,
    CorrectionConfig,
    Divergence,
    Estimator,
    Level,
    LossConfig,
    Reduction,
    RolloutSource,
    TrustRegion,
)
from megatron_rl.loss.table import LOSSES, losses

__all__ = ["check_advantage", "check_correction", "check_loss", "check_objective", "problems"]

BANDED = losses(lambda loss: loss.band)
OPEN_BANDED = losses(lambda loss: loss.band == "open")
CAPPED = losses(lambda loss: "absolute" in loss.reads)
DUAL_CLIPPED = losses(lambda loss: "dual_clip" in loss.reads)
COVARIANCE = losses(lambda loss: loss.selects)
PER_ROW = losses(lambda loss: loss.per_row)
WITH_RATIO = losses(lambda loss: loss.ratio)
AGAINST_SAMPLER = losses(lambda loss: loss.against_sampler)
SUPERVISED = losses(lambda loss: loss.supervised)


def problems(config: Config) -> list[str]:
    """What is wrong with a whole recipe's objective."""
    found = Findings(check_objective(config.correction, config.loss, config.advantage))
    _check_answers(found, config)
    _check_group_size(found, config)
    return list(found)


def _check_answers(found: Findings, config: Config) -> None:
    """Who wrote the answers decides which corrections, losses and rewards there are."""
    reward, estimator = config.reward, config.advantage.estimator
    if config.rollout.source == RolloutSource.dataset:
        way_out = "the data set's own answers come from no sampler, so there is no ratio; use"
        if config.correction.anchor == Anchor.sampler:
            found.add("correction.anchor", config.correction.anchor, f"{way_out} prox")
        if reward.learner_estimate:
            found.add("reward.learner_estimate", True, f"{way_out} false")
    elif estimator == Estimator.none and config.loss.name not in SUPERVISED:
        way_out = "every sampled answer would count the same, whatever its reward; use grpo"
        found.add("advantage.estimator", estimator, way_out)
    if found.number("reward.overlong_penalty", reward.overlong_penalty, optional=False) and reward.overlong_penalty < 0:
        found.add("reward.overlong_penalty", reward.overlong_penalty, "it is subtracted; use 0 or more")
    longest = config.rollout.max_response_tokens
    if not 0 <= reward.overlong_buffer <= longest:
        way_out = f"it is part of rollout.max_response_tokens: {longest}; use 0 (off) to {longest}"
        found.add("reward.overlong_buffer", reward.overlong_buffer, way_out)
    if estimator == Estimator.maxrl and reward.overlong_buffer > 0 and reward.overlong_penalty > 0:
        found.add(
            "advantage.estimator",
            estimator,
            f"it divides by the mean reward and needs rewards of 0 or more, which reward.overlong_buffer: "
            f"{reward.overlong_buffer} takes below 0; use grpo, or reward.overlong_buffer: 0",
        )


def _check_group_size(found: Findings, config: Config) -> None:
    rollout, estimator = config.rollout, config.advantage.estimator
    if rollout.source == RolloutSource.dataset or rollout.samples_per_prompt != 1:
        return
    if estimator in GROUP_ESTIMATORS:
        way_out = f"advantage.estimator: {estimator} compares the answers to one prompt; use 2 or more, or reinforce_pp"
        found.add("rollout.samples_per_prompt", 1, way_out)
    elif rollout.dynamic_sampling:
        way_out = "a group of rollout.samples_per_prompt: 1 has no spread and is never kept; use false"
        found.add("rollout.dynamic_sampling", True, way_out)


def check_objective(correction: CorrectionConfig, loss: LossConfig, advantage: AdvantageConfig) -> list[str]:
    """Everything about the three sections, one by one and together."""
    found = Findings(check_correction(correction) + check_loss(loss) + check_advantage(advantage))
    by_sampler = correction.anchor == Anchor.sampler
    if by_sampler and loss.name in WITH_RATIO and correction.weight.level != Level.none:
        found.add(
            "correction.weight.level",
            correction.weight.level,
            f"with correction.anchor: sampler the ratio of loss.name: {loss.name} already holds the mismatch and a "
            "weight would count it twice; use correction.weight.level: none, or loss.name: reinforce",
        )
    if loss.name in AGAINST_SAMPLER and not by_sampler:
        found.add("loss.name", loss.name, "its ratio is pi over the sampler; set correction.anchor: sampler")
    if loss.name in COVARIANCE and by_sampler:
        found.add(
            "loss.name",
            loss.name,
            "it selects tokens by the proximal logprobs; set correction.anchor: prox, or use ppo",
        )
    return list(found)


def check_loss(config: LossConfig, path: str = "loss") -> list[str]:
    found = Findings()
    found.member(f"{path}.name", config.name, LOSSES)
    found.member(f"{path}.kl_estimator", config.kl_estimator, Divergence)
    found.member(f"{path}.trust_region", config.trust_region, TrustRegion)
    if config.reduction is not None:
        found.member(f"{path}.reduction", config.reduction, Reduction)
    if config.name in PER_ROW and config.reduction == Reduction.token_mean:
        found.add(
            f"{path}.reduction",
            config.reduction,
            f"{config.name} has one ratio per sequence and averages over sequences; use seq_mean_token_mean",
        )
    usable = {
        key: found.number(f"{path}.{key}", getattr(config, key), optional=key == "dual_clip")
        for key, kind in get_type_hints(LossConfig).items()
        if float in (kind, *get_args(kind))
    }
    for key in ("clip_low", "clip_high", "kl_coef", "cov_kl_coef"):
        value = getattr(config, key)
        if usable[key] and value < 0:
            found.add(f"{path}.{key}", value, "use 0 or more")
    for key in ("tau_positive", "tau_negative"):
        value = getattr(config, key)
        if usable[key] and value <= 0:
            found.add(f"{path}.{key}", value, "use a temperature above 0")
    _check_clip(found, config, path, usable)
    if usable["cov_fraction"] and not 0 < config.cov_fraction <= 1:
        found.add(f"{path}.cov_fraction", config.cov_fraction, "it is a share of the tokens, above 0 and at most 1")
    if usable["cov_low"] and usable["cov_high"] and config.cov_low >= config.cov_high:
        found.add(f"{path}.cov_low", config.cov_low, f"it must be below {path}.cov_high, which is {config.cov_high}")
    return list(found)


def _check_clip(found: Findings, config: LossConfig, path: str, usable: Mapping[str, bool]) -> None:
    if usable["clip_low"] and config.name in BANDED and not config.absolute and config.clip_low > 1:
        found.add(f"{path}.clip_low", config.clip_low, "the ratio is clipped below at 1 - clip_low; use at most 1")
    if config.name in OPEN_BANDED:
        for key in ("clip_low", "clip_high"):
            if usable[key] and getattr(config, key) == 0:
                found.add(f"{path}.{key}", 0, "the open band ends at a ratio of 1 and drops what agrees; use above 0")
    if config.absolute and config.name not in CAPPED:
        names = ", ".join(CAPPED)
        found.add(f"{path}.absolute", True, f"only {names} caps the ratio itself; with {config.name} use false")
    if config.absolute and config.clip_high == 0:
        found.add(f"{path}.clip_high", config.clip_high, "with absolute it caps the ratio itself; use a cap above 0")
    if config.dual_clip is not None:
        if config.name not in DUAL_CLIPPED:
            names = ", ".join(DUAL_CLIPPED)
            found.add(f"{path}.dual_clip", config.dual_clip, f"only {names} have it; with {config.name} use null")
        elif usable["dual_clip"] and config.dual_clip <= 1:
            found.add(f"{path}.dual_clip", config.dual_clip, "it bounds the loss at dual_clip x |A|; use more than 1")


def check_advantage(config: AdvantageConfig, path: str = "advantage") -> list[str]:
    found = Findings()
    found.member(f"{path}.estimator", config.estimator, Estimator)
    return list(found)
