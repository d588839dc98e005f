"""The study of score centering: its gradients are those of the project's loss."""

import dataclasses
import math

import centering_statistics as lab
import pytest
import torch
from correction_statistics import REINFORCE, Toy, make_toy, mean_and_variance, mean_reward, rows_of

from megatron_rl.batch import Batch, UpdateInputs
from megatron_rl.config.schema import CorrectionConfig, LossConfig
from megatron_rl.loss.policy_loss import count_totals, policy_loss
from megatron_rl.rollout_correction.correction import rollout_correction


def through_the_loss(
    toy: Toy, choice: lab.Choice, loss: LossConfig = REINFORCE, moved: float = 0.0
) -> torch.Tensor:
    """The expected gradient as the correction and the loss give it, every word a top token; of a
    policy that has moved along the noise.
    """
    count, length = toy.sequences_BT.shape
    now_TVV = (toy.logits_TVV - moved * toy.noise_TVV).requires_grad_()
    learner_TVV = toy.logits_TVV.log_softmax(-1)
    sampler_TVV = (toy.logits_TVV + toy.noise_TVV).log_softmax(-1)
    places_T = torch.arange(length)
    words = learner_TVV.shape[-1]
    rows = rows_of(toy.sampler_BT, torch.ones_like(toy.sequences_BT, dtype=torch.bool))
    top_E = learner_TVV[places_T, toy.previous_BT].flatten()
    top_columns = {
        "top_counts_N": torch.full((count * length,), words),
        "top_logprobs_E": sampler_TVV[places_T, toy.previous_BT].flatten(),
    }
    batch = Batch(
        **rows,
        **top_columns,
        rewards_B=rows["groups_B"],
        versions_B=rows["groups_B"],
        tokens_P=torch.zeros(count * length),
        top_ids_E=torch.arange(words).repeat(count * length),
    )
    prox_N = toy.logprobs(toy.logits_TVV).flatten()
    config = CorrectionConfig(
        weight=choice.weight, center="top_logprobs" if choice.center else "none"
    )
    found = rollout_correction(batch, prox_N, config, None, None, top_E)
    targets = UpdateInputs(
        **rows,
        **top_columns,
        anchor_logprobs_N=prox_N,
        ref_logprobs_N=None,
        advantages_B=(toy.rewards_B - mean_reward(toy)) * toy.sampler_prob_B * count,
        weights_N=found.weights_N,
        denominator_mask_N=rows["mask_N"],
        top_anchor_E=top_E,
        top_weights_E=found.top_weights_E,
        tail_weights_N=found.tail_weights_N,
    )
    totals = count_totals(targets.response_lengths_B, targets.groups_B, length)
    now_E = now_TVV.log_softmax(-1)[places_T, toy.previous_BT].flatten()
    now_N = toy.logprobs(now_TVV).flatten()
    total, _ = policy_loss(now_N, targets, loss, totals, None, None, now_E)
    return -torch.autograd.grad(total, now_TVV)[0]


@pytest.mark.parametrize("name", ["none", "tis", "calibrated", "center", "center_tis"])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    toy = make_toy(0.5, seed=2, length=3)
    choice = lab.CHOICES[name]
    mean, _ = mean_and_variance(lab.gradients(toy, choice), toy.sampler_prob_B)
    torch.testing.assert_close(mean, through_the_loss(toy, choice), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["none", "tis", "center", "center_tis", "no clip"])
def test_several_updates_have_the_gradients_of_ppo(name: str) -> None:
    toy = make_toy(0.5, seed=2)
    choice = lab.CLIPPED[name]
    now_TVV = (toy.logits_TVV - toy.noise_TVV).requires_grad_()
    policies = [
        logits_TVV.log_softmax(-1)[None]
        for logits_TVV in (toy.logits_TVV, now_TVV, toy.logits_TVV + toy.noise_TVV)
    ]
    game = lab.Game(toy, toy.rewards_B[None])
    pulls_B = toy.sampler_prob_B * (toy.rewards_B - mean_reward(toy))
    found = sum(
        (part_B[None, :, None] * game.objective(choice, *policies, positive)).sum()
        for positive, part_B in ((True, pulls_B.clamp(min=0)), (False, pulls_B.clamp(max=0)))
    )
    wide = LossConfig(name="ppo", clip_low=1.0, clip_high=math.inf, reduction="seq_mean_token_sum")
    loss = dataclasses.replace(lab.PPO, reduction=wide.reduction) if choice.clip else wide
    slopes = torch.autograd.grad(found, now_TVV)[0]
    expected = through_the_loss(toy, choice, loss, moved=1.0)
    torch.testing.assert_close(slopes, expected, rtol=1e-4, atol=1e-6)


def test_centering_removes_the_drift() -> None:
    toy = make_toy(0.5, seed=2, length=3)
    for weight in (lab.NONE, lab.TOKEN_TIS):
        plain, centered = (
            mean_and_variance(lab.gradients(toy, lab.Choice(weight, center)), toy.sampler_prob_B)[0]
            for center in (False, True)
        )
        removed = plain - centered
        torch.testing.assert_close(removed, lab.drift(toy, weight), rtol=1e-6, atol=1e-9)
    without_cap = lab.drift(toy, lab.WeightConfig(high=None))
    assert float(without_cap.norm()) < 1e-6 * float(lab.drift(toy, lab.NONE).norm())


def test_training_without_a_mismatch_is_the_same_for_every_choice() -> None:
    equal = lab.Sampler(lambda net, fixed, fresh: net.logits())
    areas = [
        lab.train(equal, lab.CHOICES[name], 2, 10).learner
        for name in ("none", "tis", "center", "center_tis")
    ]
    for area in areas[1:]:
        torch.testing.assert_close(area, areas[0])
