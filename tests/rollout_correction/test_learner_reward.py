"""The learner's reward, estimated from the sampler's answers: by hand, in expectation, and its
error bar.
"""

from __future__ import annotations

import math

import pytest
import torch
from matrices import batch_of

from megatron_rl.batch import Share
from megatron_rl.rollout_correction import estimates


def learner_reward(
    rewards_B: torch.Tensor,
    prox_BT: torch.Tensor,
    mu_BT: torch.Tensor,
    **columns: torch.Tensor,
) -> dict[str, float]:
    batch = batch_of(torch.ones_like(mu_BT), mu_BT, rewards_B=rewards_B, **columns)
    return estimates.learner_reward(prox_BT.flatten(), Share.alone(batch))


def test_by_hand() -> None:
    d_BT = torch.tensor(
        [
            [math.log(2.0), 0.0],
            [math.log(0.5), 0.0],
            [0.0, 9.0],
        ]
    )
    mask_N = torch.tensor([True] * 5 + [False])
    rewards_B = torch.tensor([1.0, 0.0, 3.0])
    found = learner_reward(
        rewards_B,
        d_BT - 1,
        torch.full((3, 2), -1.0),
        mask_N=mask_N,
    )
    estimate = (2 * 1 + 0.5 * 0 + 1 * 3) / 3.5
    errors = [
        2 * (1 - estimate),
        0.5 * (0 - estimate),
        1 * (3 - estimate),
    ]
    assert found["reward/learner_estimate"] == pytest.approx(estimate)
    assert found["reward/learner_estimate_stderr"] == pytest.approx(
        math.sqrt(sum(e * e for e in errors)) / 3.5
    )


def test_a_session_counts_once_however_many_rows_it_has() -> None:
    d_BT = torch.tensor([[0.3, 0.0], [0.2, 0.2], [0.0, 0.1]])
    rewards_B = torch.tensor([1.0, 1.0, 0.0])
    mu_BT = torch.full((3, 2), -1.0)
    samples_B = torch.tensor([0, 0, 1])
    found = learner_reward(rewards_B, mu_BT + d_BT, mu_BT, samples_B=samples_B)
    assert found["reward/learner_estimate"] == pytest.approx(
        math.exp(0.7) / (math.exp(0.7) + math.exp(0.1))
    )


def test_the_learner_s_reward_is_recovered_within_its_error() -> None:
    """A sampler that avoids what the learner likes: its mean misleads, the estimate does not."""
    generator = torch.Generator().manual_seed(0)
    learner = torch.tensor([0.1, 0.2, 0.7])
    sampler = torch.tensor([0.3, 0.3, 0.4])
    value = torch.tensor([0.0, 0.5, 1.0])
    misses = 0
    for _ in range(60):
        drawn = torch.multinomial(
            sampler,
            800,
            replacement=True,
            generator=generator,
        ).view(400, 2)
        rewards_B = value[drawn].mean(1)
        found = learner_reward(rewards_B, learner.log()[drawn], sampler.log()[drawn])
        error = found["reward/learner_estimate_stderr"]
        misses += abs(found["reward/learner_estimate"] - float(learner @ value)) > 1.96 * error
        assert abs(float(rewards_B.mean()) - float(learner @ value)) > 4 * error
    assert 0 <= misses <= 9  # 3 are expected


def test_faults_and_extremes() -> None:
    prox_BT = torch.tensor([[math.nan, -1.0], [-1.0, -1.0], [-500.0, -1.0]])
    mu_BT = torch.tensor([[-1.0, -1.0], [math.inf, -1.0], [-1.0, -1.0]])
    found = learner_reward(torch.tensor([1.0, 2.0, 3.0]), prox_BT, mu_BT)
    # ratio 1 where there is none, 0 for the last
    assert found["reward/learner_estimate"] == pytest.approx(1.5)
    # a product of e^2000 leaves its own row alone
    p_BT = torch.tensor([[0.0], [2000.0]])
    huge = learner_reward(torch.tensor([1.0, 3.0]), p_BT, 0 * p_BT)
    assert huge["reward/learner_estimate"] == pytest.approx(3.0)
    some = learner_reward(torch.tensor([math.nan, 2.0, 2.0]), mu_BT, mu_BT)
    assert some["reward/learner_estimate"] == 2.0
    assert learner_reward(torch.tensor([math.nan] * 3), mu_BT, mu_BT) == {}
