"""What several answers to each prompt say of a policy: avg@k, pass@k, maj@k, with standard errors. Pure.

The answers to one prompt are drawn from one distribution; prompts are what differs. So each number is a mean over
prompts of something that belongs to one of them, and its standard error is that of such a mean: clustered by prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev


def pass_at(k: int, n: int, right: int) -> float:
    """Whether k answers hold a right one: the mean over all choices of k among the n that were drawn (unbiased)."""
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; a tie is drawn, so that the share of its right answers counts.

    None has no vote: nothing was found in the response, or it was cut off. Without any vote it is wrong.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    most = max(map(len, votes.values()), default=0)
    leaders = [fmean(verdicts) for verdicts in votes.values() if len(verdicts) == most]
    return fmean(leaders) if leaders else 0.0


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """One value for each prompt; a single prompt says nothing of its error."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
