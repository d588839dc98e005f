"""What the optimizer updates of a step are handed."""

from __future__ import annotations

import torch

from megatron_rl import train
from megatron_rl.config.schema import LossConfig
from megatron_rl.rollout_correction import CorrectionConfig, RejectRule, rollout_correction
from megatron_rl.types import Batch


def test_covariance_tokens_are_selected_among_those_that_are_trained_on() -> None:
    """The last row is rejected, and has the highest covariance by far."""
    anchor_BT = torch.tensor([[-1.0], [-2.0], [-3.0], [-90.0]])
    mu_BT = anchor_BT - torch.tensor([[0.0], [0.0], [0.0], [5.0]])
    batch = Batch(
        tokens_BS=torch.zeros(4, 2, dtype=torch.int64),
        prompt_lengths_B=torch.ones(4, dtype=torch.int64),
        response_lengths_B=torch.ones(4, dtype=torch.int64),
        mask_BT=torch.ones(4, 1, dtype=torch.bool),
        sampler_logprobs_BT=mu_BT,
        rewards_B=torch.zeros(4),
        groups_B=torch.zeros(4, dtype=torch.int64),
        versions_B=torch.zeros(4, dtype=torch.int64),
    )
    rule = RejectRule(stat="ratio", reduce="max", high=2.0)
    correction = rollout_correction(anchor_BT, mu_BT, batch.mask_BT, CorrectionConfig(reject=[rule]))
    assert correction.mask_BT[:, 0].tolist() == [True, True, True, False]
    advantages_B = torch.tensor([2.0, -1.0, -1.0, -50.0])
    targets = train.join(batch, anchor_BT, None, correction, advantages_B, LossConfig(name="kl_cov"), seed=2)
    (update,) = train.minibatches(targets, 4, "1/1")
    assert update.selected_BT is not None
    assert update.selected_BT[:, 0].tolist() == [True, False, False, False]
