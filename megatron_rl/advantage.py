"""Advantages of rollouts from their rewards (GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL), rejected ones left out of the
baseline; DAPO's penalty for overlong responses, and its test whether the rewards of a group differ.

Shape legend: N rollouts, G groups (rollouts of one prompt in one draw).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.config.schema import GROUP_ESTIMATORS, AdvantageConfig, Estimator

EPSILON = 1e-6
SPREAD = 1e-6  # rewards closer than this are the same


def group_advantages(
    rewards_N: Tensor, groups_N: Tensor, keep_N: Tensor, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Float32 advantages, 0 where `keep_N` is false: also of a group of one, if siblings are compared."""
    keep_N = keep_N.bool()
    rewards = rewards_N.double()
    if not bool(torch.isfinite(rewards[keep_N]).all()):
        raise ValueError("a kept rollout has no finite reward; leave it out of keep_N or give it a score")
    rewards = rewards.masked_fill(~keep_N, 0.0)
    if config.estimator == Estimator.none:
        return keep_N.float(), keep_N
    if config.estimator == Estimator.reinforce_pp:
        return _whiten(rewards, keep_N).float(), keep_N
    if config.estimator not in GROUP_ESTIMATORS:
        raise ValueError(f"advantage.estimator is {config.estimator!r}; one of {', '.join(Estimator)}")

    counts, sums = _group_sums(keep_N.double(), groups_N), _group_sums(rewards, groups_N)
    keep_N = keep_N & (counts >= 2)
    mean = sums / counts.clamp(min=1.0)
    centred = (rewards - mean).masked_fill(~keep_N, 0.0)
    others = (counts - 1.0).clamp(min=1.0)
    if config.estimator == Estimator.grpo:
        deviation = (_group_sums(centred.square(), groups_N) / others).sqrt()
        advantages = centred / (deviation + EPSILON)
    elif config.estimator == Estimator.rloo:
        advantages = centred * counts / others
    elif config.estimator == Estimator.maxrl:
        if bool((rewards[keep_N] < 0).any()):
            lowest = float(rewards[keep_N].min())
            raise ValueError(f"advantage.estimator maxrl needs rewards >= 0, the lowest is {lowest}; use grpo or rloo")
        advantages = centred / (mean + EPSILON)
    else:
        advantages = centred
    return advantages.masked_fill(~keep_N, 0.0).float(), keep_N


def _group_sums(values_N: Tensor, groups_N: Tensor) -> Tensor:
    """The sum over each row's group, as [N]."""
    group_ids_G, place_N = groups_N.unique(return_inverse=True)
    sums_G = torch.zeros(len(group_ids_G), dtype=values_N.dtype, device=values_N.device)
    return sums_G.index_add_(0, place_N, values_N)[place_N]


def _whiten(rewards_N: Tensor, keep_N: Tensor) -> Tensor:
    kept = rewards_N[keep_N]
    if len(kept) < 2:
        return torch.zeros_like(rewards_N)
    whitened = (rewards_N - kept.mean()) / (kept.std() + EPSILON)
    return whitened.masked_fill(~keep_N, 0.0)


def has_spread(rewards: Sequence[float]) -> bool:
    """Whether a group's scores differ: without a difference there is no advantage to learn from."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > SPREAD


def overlong_penalty(lengths_N: Tensor | Sequence[int], max_tokens: int, buffer: int, penalty: float = 1.0) -> Tensor:
    """What to add to the reward: 0 up to max_tokens - buffer, then linearly down to -penalty at max_tokens."""
    lengths = torch.as_tensor(lengths_N, dtype=torch.float32)
    if buffer <= 0:
        return torch.zeros_like(lengths)
    excess = (lengths - (max_tokens - buffer)).clamp(min=0.0, max=float(buffer))
    return excess * (-penalty / buffer)
