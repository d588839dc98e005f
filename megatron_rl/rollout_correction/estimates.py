"""Estimate of the mean reward that the learner itself would have earned, by importance weights.

A quantized sampler may lower the logged reward although the policy is unchanged; weighing each
response by the product of its ratios estimates the learner's.

Shape legend: N response tokens, B rows.
"""

import torch
from torch import Tensor

from megatron_rl.batch import Share
from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT


@torch.no_grad()
def learner_reward(prox_logprobs_N: Tensor, share: Share) -> dict[str, float]:
    """Self-normalised `reward/learner_estimate` and its standard error.

    Pass all generated rollouts: a filter by rewards has already moved the mean. Tokens without a
    ratio count as ratio 1; rollouts without a finite reward are left out.
    """
    batch = share.batch
    table = share.all
    d_N = prox_logprobs_N.double() - batch.sampler_logprobs_N.double()
    d_N = d_N.masked_fill(~(batch.mask_N & torch.isfinite(d_N)), 0.0)
    total_B = share.everywhere(batch.responses.sum(d_N))
    scored_B = torch.isfinite(table.rewards_B)
    totals = total_B[scored_B]
    rewards = table.rewards_B[scored_B].double()
    if not len(rewards):
        return {}
    if table.samples_B is not None:
        keys_B2 = torch.stack((table.groups_B, table.samples_B), dim=1)
        sessions, place = keys_B2[scored_B].unique(dim=0, return_inverse=True)
        totals = totals.new_zeros(len(sessions)).index_add_(0, place, totals)
        rewards = rewards.new_zeros(len(sessions)).index_copy_(0, place, rewards)
    # a common factor cancels, so the largest weight is set to 1: nothing overflows
    weights = (totals - totals.max()).clamp(min=-2 * EXPONENT_LIMIT).exp()
    weights = weights / weights.sum()
    estimate = (weights * rewards).sum()
    error = (weights * (rewards - estimate)).square().sum().sqrt()
    return {
        "reward/learner_estimate": float(estimate),
        "reward/learner_estimate_stderr": float(error),
    }
