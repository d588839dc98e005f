"""What is wrong with a correction, loss or advantage config, said before torch is loaded.

Each check returns sentences that name the key's path, its value and the way out; an empty list is a clean config.
"""

from __future__ import annotations

from difflib import get_close_matches

from megatron_rl.config.correction_values import Findings, check_correction
from megatron_rl.config.schema import (
    PARAMETERS,
    AdvantageConfig,
    Anchor,
    CorrectionConfig,
    Level,
    LossConfig,
    Reduction,
    Stat,
)
from megatron_rl.config.shape import sound
from megatron_rl.loss.table import LOSSES, losses

__all__ = ["check_advantage", "check_correction", "check_loss", "check_objective"]

BANDED = losses(lambda loss: loss.band)
OPEN_BANDED = losses(lambda loss: loss.band == "open")
CAPPED = losses(lambda loss: "absolute" in loss.reads)
COVARIANCE = losses(lambda loss: loss.selects)
PER_ROW = losses(lambda loss: loss.per_row)
WITH_RATIO = losses(lambda loss: loss.ratio)
AGAINST_SAMPLER = losses(lambda loss: loss.against_sampler)
SUPERVISED = losses(lambda loss: loss.supervised)


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


def corrects(correction: CorrectionConfig, loss: LossConfig) -> bool:
    """Whether anything in the objective depends on how far the learner is from the sampler."""
    if correction.anchor == Anchor.sampler and loss.name in WITH_RATIO:
        return True
    return correction.weight.level != Level.none or any(rule.stat != Stat.staleness for rule in correction.reject)


def check_loss(config: LossConfig, path: str = "loss") -> list[str]:
    """Values one by one, then what two of them say together."""
    config, wrong = sound(config, path)
    found = Findings(wrong.values())
    if config.name in PER_ROW and config.reduction == Reduction.token_mean:
        found.add(
            f"{path}.reduction",
            config.reduction,
            f"{config.name} has one ratio per sequence and averages over sequences; use seq_mean_token_mean",
        )
    _check_clip(found, config, path)
    if config.cov_low >= config.cov_high:
        high = f"{path}.parameters.cov_high, which is {config.cov_high}"
        found.add(f"{path}.parameters.cov_low", config.cov_low, f"it must be below {high}")
    return list(found)


def _check_clip(found: Findings, config: LossConfig, path: str) -> None:
    if config.name in BANDED and not config.absolute and config.clip_low > 1:
        found.add(f"{path}.clip_low", config.clip_low, "the ratio is clipped below at 1 - clip_low; use at most 1")
    if config.name in OPEN_BANDED:
        for key in ("clip_low", "clip_high"):
            if getattr(config, key) == 0:
                found.add(f"{path}.{key}", 0, "the open band ends at a ratio of 1 and drops what agrees; use above 0")
    if config.absolute and config.name not in CAPPED:
        names = ", ".join(CAPPED)
        found.add(f"{path}.absolute", True, f"only {names} caps the ratio itself; with {config.name} use false")
    if config.absolute and config.clip_high == 0:
        found.add(f"{path}.clip_high", config.clip_high, "with absolute it caps the ratio itself; use a cap above 0")
    for name, value in config.parameters.items():
        readers = [each for each, loss in LOSSES.items() if name in PARAMETERS and name in loss.reads]
        near = "".join(f"did you mean {each}? " for each in get_close_matches(name, PARAMETERS, n=1) if not readers)
        if not readers:
            found.add(f"{path}.parameters.{name}", value, f"{near}there are {', '.join(PARAMETERS)}")
        elif value is not None and config.name not in readers:
            found.add(f"{path}.parameters.{name}", value, f"only {', '.join(readers)} has it; leave it out")


def check_advantage(config: AdvantageConfig, path: str = "advantage") -> list[str]:
    return list(sound(config, path)[1].values())
