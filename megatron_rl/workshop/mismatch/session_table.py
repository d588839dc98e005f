"""Mismatch of recorded sessions by turn, by place in the turn, and by kind of token, as a table."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.rollout_correction.breakdown import OF_SESSIONS, pooled
from megatron_rl.runs.console import table
from megatron_rl.runs.rollout_file import Recorded
from megatron_rl.workshop.reports.run_data import breakdowns_of

HEAD = ("recorded tokens by", "", "tokens", "mean d", "k3", "mean |d|", "mult_prob_error")


def session_table(recorded: Iterable[Recorded]) -> str:
    """Begins with an empty line; empty where there are no sessions, or no learner logprobs."""
    parts = pooled(part for one in recorded for part in breakdowns_of(one) if part.by in OF_SESSIONS)
    if not parts:
        return ""
    rows = [
        [part.by, part.label, f"{part.tokens:,}", f"{-part.kl:+.2e}", f"{part.k3_kl:.2e}", f"{part.abs_diff:.2e}",
         f"{part.mult_prob_error:.4f}"]
        for part in parts
    ]  # fmt: skip
    return "\n".join(["\n", *table(HEAD, rows)])
