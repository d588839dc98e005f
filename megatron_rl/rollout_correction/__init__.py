"""(p, mu, mask) -> weights, mask, metrics. Pure. `correction.py` is the file to read first."""

from megatron_rl.config.schema import CorrectionConfig, RejectRule, WeightConfig
from megatron_rl.rollout_correction.correction import (
    Correction,
    apply_conditional_rules,
    completed,
    correct,
    keep_rows,
    rollout_correction,
)
from megatron_rl.rollout_correction.rules import staleness, without_stale

__all__ = [
    "Correction",
    "CorrectionConfig",
    "RejectRule",
    "WeightConfig",
    "apply_conditional_rules",
    "completed",
    "correct",
    "keep_rows",
    "rollout_correction",
    "staleness",
    "without_stale",
]
