"""Policy losses and their reductions. Pure. `policy_loss.py` is the file to read first."""

from megatron_rl.config.schema import LossConfig
from megatron_rl.loss.policy_loss import Totals, count_totals, policy_loss, reduction_of, seen_tokens
from megatron_rl.types import LossInputs

__all__ = ["LossConfig", "LossInputs", "Totals", "count_totals", "policy_loss", "reduction_of", "seen_tokens"]
