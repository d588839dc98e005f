"""Advantages of rollouts, sessions, turns from rewards (GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL),
rejected ones left out of the baseline; DAPO's penalty for overlong responses, and its check that
the rewards of a group differ.

Shape legend: N rollouts, G groups (rollouts of one prompt in one draw).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.config.schema import AdvantageConfig, Credit, Estimator

if TYPE_CHECKING:
    from megatron_rl.batch import Share

EPSILON = 1e-6
SPREAD = 1e-6  # rewards closer than this are equal


def group_advantages(
    rewards_N: Tensor,
    groups_N: Tensor,
    keep_N: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """Float32 advantages; 0 where `keep_N` is false, or siblings are compared and none is left."""
    keep_N = keep_N.bool()
    rewards = rewards_N.double().masked_fill(~keep_N, 0.0)
    if config.estimator == Estimator.none:
        return keep_N.float(), keep_N
    if config.estimator == Estimator.reinforce_pp:
        return _whiten(rewards, keep_N).float(), keep_N
    counts = _group_sums(keep_N.double(), groups_N)
    sums = _group_sums(rewards, groups_N)
    keep_N = keep_N & (counts >= 2)
    mean = sums / counts.clamp(min=1.0)
    centred = (rewards - mean).masked_fill(~keep_N, 0.0)
    if config.estimator == Estimator.maxrl and bool((rewards[keep_N] < 0).any()):
        lowest = float(rewards[keep_N].min())
        raise ValueError(
            f"advantage.estimator maxrl needs rewards >= 0, the lowest is {lowest}; use grpo or "
            "rloo"
        )
    times, over = _scale(centred, mean, counts, groups_N, config)
    advantages = centred * times / over
    return advantages.masked_fill(~keep_N, 0.0).float(), keep_N


def session_advantages(
    rewards_N: Tensor,
    groups_N: Tensor,
    samples_N: Tensor | None,
    keep_N: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """`group_advantages` for sessions of several rows, which count once in the group's baseline."""
    if samples_N is None:
        return group_advantages(rewards_N, groups_N, keep_N, config)
    keep_N = keep_N.bool()
    first_N = _first_rows(groups_N, samples_N, keep_N)
    stands_N = keep_N & (first_N == torch.arange(len(first_N)))
    advantages_N, kept_N = group_advantages(rewards_N, groups_N, stands_N, config)
    kept_N = kept_N[first_N] & keep_N
    return advantages_N[first_N].masked_fill(~kept_N, 0.0), kept_N


def turn_advantages(
    share: Share, advantages_B: Tensor, keep_B: Tensor, config: AdvantageConfig, credit: Credit
) -> Tensor | None:
    """Advantages of tokens by the returns of turns; None if rewards are credited to whole rows.

    A turn's return takes the place of its session's reward. The baseline stays the group's mean of
    whole sessions, which is independent of a turn's actions and of when it stops. `keep_B`: the
    rows that count in it. Both of all rows.
    """
    batch = share.batch
    table = share.all
    if batch.credit_N is None or credit == Credit.outcome:
        return None
    if credit == Credit.environment:
        return batch.credit_N
    assert table.samples_B is not None
    counted_B = torch.isfinite(table.rewards_B) & keep_B
    stands_B = counted_B & (
        _first_rows(table.groups_B, table.samples_B, counted_B) == torch.arange(len(counted_B))
    )
    scale_B = _reward_scale(table.rewards_B, table.groups_B, stands_B, config)

    def own_N(values_B: Tensor) -> Tensor:
        return batch.responses.at_tokens(values_B[share.own])

    returns_N = own_N(advantages_B) + batch.credit_N * own_N(scale_B)
    return returns_N.masked_fill(~own_N(counted_B), 0.0)


def _first_rows(groups_N: Tensor, samples_N: Tensor, keep_N: Tensor) -> Tensor:
    """For each row the first kept one of its session; itself, where there is none."""
    rows_N = torch.arange(len(groups_N))
    _, session_N = torch.stack((groups_N, samples_N), dim=1).unique(dim=0, return_inverse=True)
    first = torch.full((len(groups_N),), len(groups_N)).scatter_reduce_(
        0, session_N[keep_N], rows_N[keep_N], "amin"
    )
    return torch.where(first[session_N] < len(groups_N), first[session_N], rows_N)


def _reward_scale(
    rewards_N: Tensor, groups_N: Tensor, stands_N: Tensor, config: AdvantageConfig
) -> Tensor:
    """Factor from reward differences to advantages; 0 where it would divide by 0."""
    rewards = rewards_N.double().masked_fill(~stands_N, 0.0)
    if config.estimator == Estimator.reinforce_pp:
        kept = rewards[stands_N]
        spread = float(kept.std()) if len(kept) > 1 else 0.0
        return torch.full_like(
            rewards, 1.0 / (spread + EPSILON) if spread > SPREAD else 0.0
        ).float()
    counts = _group_sums(stands_N.double(), groups_N)
    mean = _group_sums(rewards, groups_N) / counts.clamp(min=1.0)
    times, over = _scale(
        (rewards - mean).masked_fill(~stands_N, 0.0), mean, counts, groups_N, config
    )
    return torch.where(over - EPSILON > SPREAD, times / over, 0.0).float()


def _scale(
    centred_N: Tensor, mean_N: Tensor, counts_N: Tensor, groups_N: Tensor, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of an estimator's factor on a reward less its group's mean."""
    one_N = torch.ones_like(mean_N)
    others_N = (counts_N - 1.0).clamp(min=1.0)
    if config.estimator == Estimator.grpo:
        return one_N, (_group_sums(centred_N.square(), groups_N) / others_N).sqrt() + EPSILON
    if config.estimator == Estimator.rloo:
        return counts_N, others_N
    if config.estimator == Estimator.maxrl:
        return one_N, mean_N + EPSILON
    return one_N, one_N


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


def has_variance(rewards: Sequence[float]) -> bool:
    """True if a group's scores differ; without a difference all its advantages are 0."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > SPREAD


def overlong_penalty(lengths_N: Tensor | Sequence[int], max_tokens: int, buffer: int) -> Tensor:
    """Penalty to add: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens."""
    lengths = torch.as_tensor(lengths_N, dtype=torch.float32)
    if buffer <= 0:
        return torch.zeros_like(lengths)
    excess = (lengths - (max_tokens - buffer)).clamp(min=0.0, max=float(buffer))
    return excess * (-1.0 / buffer)
