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


def keeps_kl(project: str, which: str = "rejected tokens") -> str:
    """For projects whose reference KL and entropy still count what their correction rejects."""
    return f"{project}'s reference KL and entropy count {which} too; goes with loss.kl_on: counted where either is on"


def gspo_tokens(project: str, which: str = "all tokens of a row") -> str:
    return f"with GSPO {project} averages the ratio over {which}, ours over the tokens that are left"


def opsm(delta: float) -> RejectRule:
    """Off-policy sequence masking: answers that are pushed down and that the learner finds unlikely leave."""
    return RejectRule(stat=Stat.k1, reduce=Reduce.mean, high=delta, when=When.negative_advantage)
