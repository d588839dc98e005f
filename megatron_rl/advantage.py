"""Advantages of rollouts, sessions, turns from rewards (GRPO, Dr. GRPO, RLOO, REINFORCE++, MaxRL),
rejected ones left out of the baseline; DAPO's penalty for overlong responses, and its check that
the rewards of a group differ.

Shape legend: B rows (rollouts), N response tokens, G groups (rollouts of one prompt in one draw).
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
    rewards_B: Tensor,
    groups_B: Tensor,
    keep_B: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """Float32 advantages; 0 where `keep_B` is false, or siblings are compared and none is left."""
    keep_B = keep_B.bool()
    rewards = rewards_B.double().masked_fill(~keep_B, 0.0)
    if config.estimator == Estimator.none:
        return keep_B.float(), keep_B
    if config.estimator == Estimator.reinforce_pp:
        return _whiten(rewards, keep_B).float(), keep_B
    counts = _group_sums(keep_B.double(), groups_B)
    sums = _group_sums(rewards, groups_B)
    keep_B = keep_B & (counts >= 2)
    mean = sums / counts.clamp(min=1.0)
    centred = (rewards - mean).masked_fill(~keep_B, 0.0)
    if config.estimator == Estimator.maxrl and bool((rewards[keep_B] < 0).any()):
        lowest = float(rewards[keep_B].min())
        raise ValueError(
            f"advantage.estimator maxrl needs rewards >= 0, the lowest is {lowest}; use grpo or "
            "rloo"
        )
    times, over = _scale(centred, mean, counts, groups_B, config)
    advantages = centred * times / over
    return advantages.masked_fill(~keep_B, 0.0).float(), keep_B


def session_advantages(
    rewards_B: Tensor,
    groups_B: Tensor,
    samples_B: Tensor | None,
    keep_B: Tensor,
    config: AdvantageConfig,
) -> tuple[Tensor, Tensor]:
    """`group_advantages` for sessions of several rows, which count once in the group's baseline."""
    if samples_B is None:
        return group_advantages(rewards_B, groups_B, keep_B, config)
    keep_B = keep_B.bool()
    first_B = _first_rows(groups_B, samples_B, keep_B)
    stands_B = keep_B & (first_B == torch.arange(len(first_B)))
    advantages_B, kept_B = group_advantages(rewards_B, groups_B, stands_B, config)
    kept_B = kept_B[first_B] & keep_B
    return advantages_B[first_B].masked_fill(~kept_B, 0.0), kept_B


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


def _first_rows(groups_B: Tensor, samples_B: Tensor, keep_B: Tensor) -> Tensor:
    """For each row the first kept one of its session; itself, where there is none."""
    rows_B = torch.arange(len(groups_B))
    _, session_B = torch.stack((groups_B, samples_B), dim=1).unique(dim=0, return_inverse=True)
    first = torch.full((len(groups_B),), len(groups_B)).scatter_reduce_(
        0, session_B[keep_B], rows_B[keep_B], "amin"
    )
    return torch.where(first[session_B] < len(groups_B), first[session_B], rows_B)


def _reward_scale(
    rewards_B: Tensor, groups_B: Tensor, stands_B: Tensor, config: AdvantageConfig
) -> Tensor:
    """Factor from reward differences to advantages; 0 where it would divide by 0."""
    rewards = rewards_B.double().masked_fill(~stands_B, 0.0)
    if config.estimator == Estimator.reinforce_pp:
        kept = rewards[stands_B]
        spread = float(kept.std()) if len(kept) > 1 else 0.0
        return torch.full_like(
            rewards, 1.0 / (spread + EPSILON) if spread > SPREAD else 0.0
        ).float()
    counts = _group_sums(stands_B.double(), groups_B)
    mean = _group_sums(rewards, groups_B) / counts.clamp(min=1.0)
    times, over = _scale(
        (rewards - mean).masked_fill(~stands_B, 0.0), mean, counts, groups_B, config
    )
    return torch.where(over - EPSILON > SPREAD, times / over, 0.0).float()


def _scale(
    centred_B: Tensor, mean_B: Tensor, counts_B: Tensor, groups_B: Tensor, config: AdvantageConfig
) -> tuple[Tensor, Tensor]:
    """Numerator and denominator of an estimator's factor on a reward less its group's mean."""
    one_B = torch.ones_like(mean_B)
    others_B = (counts_B - 1.0).clamp(min=1.0)
    if config.estimator == Estimator.grpo:
        return one_B, (_group_sums(centred_B.square(), groups_B) / others_B).sqrt() + EPSILON
    if config.estimator == Estimator.rloo:
        return counts_B, others_B
    if config.estimator == Estimator.maxrl:
        return one_B, mean_B + EPSILON
    return one_B, one_B


def _group_sums(values_B: Tensor, groups_B: Tensor) -> Tensor:
    """The sum over each row's group, as [B]."""
    group_ids_G, place_B = groups_B.unique(return_inverse=True)
    sums_G = torch.zeros(len(group_ids_G), dtype=values_B.dtype, device=values_B.device)
    return sums_G.index_add_(0, place_B, values_B)[place_B]


def _whiten(rewards_B: Tensor, keep_B: Tensor) -> Tensor:
    kept = rewards_B[keep_B]
    if len(kept) < 2:
        return torch.zeros_like(rewards_B)
    whitened = (rewards_B - kept.mean()) / (kept.std() + EPSILON)
    return whitened.masked_fill(~keep_B, 0.0)


def has_variance(rewards: Sequence[float]) -> bool:
    """True if a group's scores differ; without a difference all its advantages are 0."""
    return len(rewards) > 1 and max(rewards) - min(rewards) > SPREAD


def overlong_penalty(lengths_B: Tensor | Sequence[int], max_tokens: int, buffer: int) -> Tensor:
    """Penalty to add: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens."""
    lengths = torch.as_tensor(lengths_B, dtype=torch.float32)
    if buffer <= 0:
        return torch.zeros_like(lengths)
    excess = (lengths - (max_tokens - buffer)).clamp(min=0.0, max=float(buffer))
    return excess * (-1.0 / buffer)
