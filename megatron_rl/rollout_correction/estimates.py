"""Estimate of the mean reward that the learner itself would have earned, by importance weights.

A quantized sampler that answers worse lowers the logged reward while the policy is as good as
before; weighing each answer by the product of its ratios turns it into the learner's.

Shape legend: N rollouts or B sequences, T response positions.
"""

import torch
from torch import Tensor

from megatron_rl.rollout_correction.ratio import EXPONENT_LIMIT


@torch.no_grad()
def learner_reward(
    rewards_N: Tensor,
    prox_logprobs_NT: Tensor,
    sampler_logprobs_NT: Tensor,
    mask_NT: Tensor,
    sessions_N2: Tensor | None = None,
) -> dict[str, float]:
    """Self-normalised `reward/learner_estimate` and its standard error.

    Pass all generated rollouts: a filter by rewards has already moved the mean. Tokens without a
    ratio count as ratio 1; rollouts without a finite reward are left out. `sessions_N2`: group and
    sample of each row, where a sample may have several.
    """
    scored_N = torch.isfinite(rewards_N)
    rewards = rewards_N[scored_N].double()
    if not len(rewards):
        return {}
    d_NT = (prox_logprobs_NT.double() - sampler_logprobs_NT.double())[scored_N]
    d_NT = d_NT.masked_fill(~(mask_NT[scored_N].bool() & torch.isfinite(d_NT)), 0.0)
    total_N = d_NT.sum(dim=1)
    if sessions_N2 is not None:
        sessions, place_N = sessions_N2[scored_N].unique(dim=0, return_inverse=True)
        total_N = total_N.new_zeros(len(sessions)).index_add_(0, place_N, total_N)
        rewards = rewards.new_zeros(len(sessions)).index_copy_(0, place_N, rewards)
    # a common factor cancels, so the largest weight is set to 1: nothing overflows
    weights_N = (total_N - total_N.max()).clamp(min=-2 * EXPONENT_LIMIT).exp()
    weights_N = weights_N / weights_N.sum()
    estimate = (weights_N * rewards).sum()
    error = (weights_N * (rewards - estimate)).square().sum().sqrt()
    return {
        "reward/learner_estimate": float(estimate),
        "reward/learner_estimate_stderr": float(error),
    }
