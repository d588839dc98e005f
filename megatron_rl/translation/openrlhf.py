"""OpenRLHF's `--algo.advantage.is_correction_*`, under these names and their former ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rl.config.schema import CorrectionConfig, Level, Outside, Reduce, RejectRule, Stat, WeightConfig
from megatron_rl.translation.keys import Keys, Translation, anywhere
from megatron_rl.translation.shared import BYPASS, NO_WEIGHT, keeps_kl

ENABLE, BOUNDS, KIND = "is_correction_enable", "is_correction_threshold", "is_correction_type"
FORMER = {
    "enable_vllm_is_correction": ENABLE,
    "vllm_is_truncated_threshold": BOUNDS,
    "vllm_is_correction_type": KIND,
}
REMOVED = {"use_icepop": f"{KIND}: icepop does it"}


def openrlhf(mapping: Mapping[str, Any]) -> Translation:
    keys = anywhere("openrlhf", mapping, (ENABLE, BOUNDS, KIND, "policy_loss_type", *FORMER), old=REMOVED)
    keys.rename(FORMER)
    low, high = _bounds(keys)
    kind = keys.choice(KIND, "tis", "tis", "icepop", "seq-mask-tis")
    given = keys.given(BOUNDS) or keys.given(KIND)
    if given and not keys.given(ENABLE):
        keys.notes.append(f"{ENABLE} is not given and taken as true; without it OpenRLHF corrects nothing")
    if not keys.flag(ENABLE, default=given):
        return Translation(CorrectionConfig(weight=NO_WEIGHT, rebaseline=False, renormalize=False), keys.notes)
    if keys.choice("policy_loss_type", "ppo", "ppo", "gspo") == "gspo":
        keys.notes.append("with gspo OpenRLHF takes the sampler's logprobs as the anchor; goes with loss.name: gspo")
        return Translation(BYPASS, keys.notes)
    rules = []
    if kind == "seq-mask-tis":
        weight = WeightConfig(level=Level.token, high=None)
        rules.append(RejectRule(stat=Stat.ratio, reduce=Reduce.mean, low=low, high=high))
        keys.notes.append(keeps_kl("OpenRLHF"))
    else:
        outside = Outside.zero if kind == "icepop" else Outside.truncate
        weight = WeightConfig(level=Level.token, outside=outside, low=low, high=high)
    return Translation(CorrectionConfig(weight=weight, reject=rules, rebaseline=False, renormalize=False), keys.notes)


def _bounds(keys: Keys) -> tuple[float, float]:
    """A pair, or the two words of the flag."""
    bounds = keys.raw(BOUNDS)
    if isinstance(bounds, str):
        bounds = bounds.split()
    if bounds is None:
        bounds = (0.5, 5.0)
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise keys.error(BOUNDS, "expected two numbers, low and high")
    low, high = (keys.as_number(BOUNDS, bound) for bound in bounds)
    return low, high
