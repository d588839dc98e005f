"""How long a run waits before it takes silence for a hang: `run.patience_s`, what follows from it, and what it says.

A rank is silent while it does nothing that can be seen: no phase begins, no micro-batch is done, no engine, server or
reward answers. Waits for those have limits of their own; everything else has this one.
"""

from __future__ import annotations

from megatron_rl.config.schema import Config, SamplerSection

UNSEEN = 3.0  # times run.patience_s: a phase that has not been seen yet may compile, load, connect
USUAL = 5.0  # times the longest silence that a phase has shown
MARGIN_S = 60.0  # after a limit of its own, in which whoever waits ends the wait itself


def allowed_s(patience_s: float, longest_s: float | None) -> float:
    """Seconds of silence allowed in a phase, given the longest that it has shown (None: not known)."""
    most = UNSEEN * patience_s
    return most if longest_s is None else min(most, max(patience_s, USUAL * longest_s))


def collective_s(patience_s: float, sampler: SamplerSection) -> float:
    """torch's own limit: longer than any rank may be late, even where nobody watches.

    While rank 0 generates, evaluates or scores it tells the others every now and then to wait on; in a sync they wait
    for three answers of the engines, the first time for their start as well.
    """
    engines_s = sampler.start_timeout_s + 3 * sampler.request_timeout_s
    return max(UNSEEN * patience_s, engines_s) + 2 * MARGIN_S


def describe(config: Config) -> str:
    sampler, patience_s = config.sampler, config.run.patience_s
    return (
        f"silence ends the run after {patience_s:g} s, or {USUAL:g} times the phase's longest, at most "
        f"{UNSEEN * patience_s:g} s; an engine has {sampler.start_timeout_s:g} s to start and "
        f"{sampler.request_timeout_s:g} s to answer, a reward {config.reward.timeout_s:g} s"
    )
