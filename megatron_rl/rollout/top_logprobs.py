"""Metrics of the top logprobs that the sampler reports with its tokens."""

from collections.abc import Sequence

import numpy as np

from megatron_rl.config.sampling import TopLogprobsSection
from megatron_rl.types import Rollout


def top_metrics(rollouts: Sequence[Rollout], section: TopLogprobsSection) -> dict[str, float]:
    """Means over the sampled tokens whose top logprobs are known; none if they are off."""
    if not section.max:
        return {}
    tokens = 0
    counts = 0
    mass = 0.0
    limited = 0
    for one in rollouts:
        if one.top_counts is None or one.top_logprobs is None or not len(one.top_logprobs):
            continue
        counts_T = np.asarray(one.top_counts, np.int64)
        counts_T = counts_T[counts_T > 0]  # of sampled tokens
        shares_E = np.exp(one.top_logprobs, dtype=np.float32)
        masses_T = np.add.reduceat(shares_E, counts_T.cumsum() - counts_T)
        known_T = ~np.isnan(masses_T)
        tokens += int(known_T.sum())
        counts += int(counts_T[known_T].sum())
        mass += float(masses_T[known_T].sum(dtype=np.float64))
        limited += int(((counts_T == section.max) & (masses_T < section.mass)).sum())
    return {
        "rollout/top_tokens_mean": counts / max(tokens, 1),
        "rollout/top_mass_mean": mass / max(tokens, 1),
        "rollout/top_tokens_limited_fraction": limited / max(tokens, 1),
    }
