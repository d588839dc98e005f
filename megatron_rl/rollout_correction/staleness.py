"""Tokens of policies that are too old to be trained on: reject rules with `stat: staleness`.

They look at no logprob and come first. What they reject is in no row's statistic, weight or denominator.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.config.schema import CorrectionConfig, Stat
from megatron_rl.rollout_correction.metrics import PREFIX
from megatron_rl.rollout_correction.ratio import LogRatio
from megatron_rl.rollout_correction.rules import violations
from megatron_rl.types import Batch


@torch.no_grad()
def without_stale(batch: Batch, config: CorrectionConfig, version: int) -> tuple[Batch, dict[str, float]]:
    """The batch without the tokens that rules on staleness reject, and the share that they were.

    `version`: the learner's policy version. A token that is newer is not stale.
    """
    rules = [rule for rule in config.reject if rule.stat == Stat.staleness]
    if not rules:
        return batch, {}
    mask_BT = batch.mask_BT
    age_BT = (version - batch.token_versions_BT).clamp(min=0).float() * mask_BT
    ages = LogRatio(age_BT, mask_BT, mask_BT, None, 0, 0)
    young_BT = mask_BT
    for rule in rules:
        young_BT = young_BT & ~violations(rule, ages)
    rejected = 1.0 - int(young_BT.sum()) / max(1, int(mask_BT.sum()))
    return replace(batch, mask_BT=young_BT), {PREFIX + "stale_masked_fraction": rejected}
