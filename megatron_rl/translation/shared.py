"""Configs and rules that several projects' settings come down to."""

from __future__ import annotations

from megatron_rl.config.schema import (
    Anchor,
    CorrectionConfig,
    Level,
    Reduce,
    RejectRule,
    Stat,
    WeightConfig,
    When,
)

NO_WEIGHT = WeightConfig(level=Level.none)
BYPASS = CorrectionConfig(anchor=Anchor.sampler, weight=NO_WEIGHT, rebaseline=False, renormalize=False)


def opsm(delta: float) -> RejectRule:
    """Off-policy sequence masking: answers that are pushed down and that the learner finds unlikely leave."""
    return RejectRule(stat=Stat.k1, reduce=Reduce.mean, high=delta, when=When.negative_advantage)
