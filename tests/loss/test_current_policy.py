"""Anchors between the sampler and the policy.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_cases import BYPASS, rows_of
from loss_oracle import expected
from matrices import LossInputs, batch_of, count_totals, policy_loss
from test_loss import example

from megatron_rl.config.correction_rules import check_objective
from megatron_rl.config.schema import (
    CorrectionConfig,
    LossConfig,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.policy_loss import over_trained
from megatron_rl.rollout_correction.correction import staleness

BETWEEN = replace(BYPASS, anchor="interpolated", weight=WeightConfig(high=1.2))


def gradient(
    inputs: LossInputs, loss: LossConfig, correction: CorrectionConfig | None
) -> torch.Tensor:
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, 7)
    value, _ = policy_loss(inputs, loss, totals, correction)
    (found,) = torch.autograd.grad(value, inputs.logprobs_BT)
    return found


def stale(seed: int, age: float | None = None) -> LossInputs:
    """Inputs as a run without a prox pass has them: the sampler's logprobs are the anchor's."""
    inputs = example(seed)
    random = torch.Generator().manual_seed(seed)
    ages_BT = torch.randint(0, 5, inputs.mask_BT.shape, generator=random).float()
    ages_BT = ages_BT if age is None else torch.full_like(ages_BT, age)
    weights_BT = inputs.mask_BT.double()
    return replace(
        inputs,
        anchor_logprobs_BT=inputs.sampler_logprobs_BT,
        weights_BT=weights_BT,
        staleness_BT=ages_BT,
    )


@pytest.mark.parametrize(
    "loss", [LossConfig(clip_low=0.05, clip_high=0.05), LossConfig(name="cispo", clip_high=0.02)]
)
def test_the_anchor_lies_between_sampler_and_policy(loss: LossConfig) -> None:
    inputs = stale(3)
    mu_BT = inputs.sampler_logprobs_BT
    pi_BT = inputs.logprobs_BT.detach()
    anchor_BT = mu_BT + inputs.staleness_BT / (inputs.staleness_BT + 1) * (pi_BT - mu_BT)
    weights_BT = (anchor_BT - mu_BT).exp().clamp(max=1.2) * inputs.mask_BT
    known = replace(inputs, anchor_logprobs_BT=anchor_BT, weights_BT=weights_BT)
    found = gradient(inputs, loss, BETWEEN)
    torch.testing.assert_close(
        found, expected(known, loss, "token_mean", 7)[1], rtol=1e-5, atol=1e-7
    )
    halves = [rows_of(inputs, slice(0, 4)), rows_of(inputs, slice(4, 8))]
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, 7)
    parts = [policy_loss(half, loss, totals, BETWEEN) for half in halves]
    whole = policy_loss(inputs, loss, totals, BETWEEN)
    assert float(sum(part[0].detach() for part in parts)) == pytest.approx(float(whole[0].detach()))
    for name in ("rollout_corr/kl", "rollout_corr/rollout_rs_masked_fraction", "loss/ratio_mean"):
        assert float(sum(part[1][name] for part in parts)) == pytest.approx(
            float(whole[1][name])
        ), name


def test_metrics_are_of_what_the_rules_in_the_loss_have_left() -> None:
    """Metrics of the ratio to the proximal policy: fresh tokens are the sampler's, none masked."""
    rule = RejectRule(level="token", stat="ratio", low=0.9, high=1.1)
    for age in (0.0, 1.0):
        inputs = stale(3, age)
        found = policy_loss(
            inputs,
            LossConfig(),
            None,
            replace(BETWEEN, reject=[rule]),
        )[1]
        rejected = found["rollout_corr/rollout_rs_masked_fraction"]
        trained = found["loss/trained_fraction"]
        assert (rejected > 0) == (age > 0)
        tokens = int(inputs.mask_BT.sum())
        counted = int(inputs.denominator_mask_BT.sum())
        assert float(rejected + trained) * counted == pytest.approx(tokens)
    held = over_trained({"loss/trained_fraction": 0.5, "loss/ratio_mean": 0.5, "loss/total": 1.0})
    assert held == {"loss/trained_fraction": 0.5, "loss/ratio_mean": 1.0, "loss/total": 1.0}


def test_of_fresh_tokens_it_is_the_sampler_and_of_old_ones_the_policy() -> None:
    loss = LossConfig(clip_low=0.05, clip_high=0.05)
    fresh = stale(4, 0.0)
    old = stale(4, 1e9)
    torch.testing.assert_close(gradient(fresh, loss, BETWEEN), gradient(fresh, loss, BYPASS))
    weights_BT = (old.logprobs_BT.detach() - old.sampler_logprobs_BT).exp().clamp(
        max=1.2
    ) * old.mask_BT
    itself = replace(old, anchor_logprobs_BT=old.logprobs_BT.detach(), weights_BT=weights_BT)
    torch.testing.assert_close(
        gradient(old, loss, BETWEEN), gradient(itself, loss, None), rtol=1e-5, atol=1e-7
    )
    # what is logged is the mismatch with the policy, however much of it the anchor has taken over
    logged = [
        float(policy_loss(fresh, loss, None, one)[1]["rollout_corr/kl"])
        for one in (BETWEEN, BYPASS)
    ]
    assert logged[0] == logged[1] != 0.0


def test_a_token_without_a_logprob() -> None:
    inputs = stale(5)
    inputs.sampler_logprobs_BT[0, 0] = math.nan
    assert torch.isfinite(gradient(inputs, LossConfig(), BETWEEN)).all()
    assert gradient(inputs, LossConfig(), BETWEEN)[0, 0] == 0.0


def test_ages_are_counted_from_the_version_that_wrote_the_token() -> None:
    batch = batch_of(
        torch.ones(2, 3, dtype=torch.bool),
        torch.zeros(2, 3),
        versions_B=torch.tensor([5, 7]),
        versions_BT=torch.tensor([[5, 6, 7], [7, 7, 8]]),
    )
    found_N = staleness(batch, BETWEEN, 7)
    assert found_N is not None and found_N.tolist() == [2, 1, 0, 0, 0, 0]
    assert staleness(batch, BYPASS, 7) is None


@pytest.mark.parametrize(
    ("correction", "loss", "key"),
    [
        (replace(BETWEEN, rebaseline=True), LossConfig(), "correction.rebaseline is true"),
        (BETWEEN, LossConfig(name="kl_cov"), "loss.name is kl_cov"),
        (BETWEEN, LossConfig(name="vespo"), "loss.name is vespo"),
    ],
)
def test_what_does_not_go_together(
    correction: CorrectionConfig, loss: LossConfig, key: str
) -> None:
    (found,) = check_objective(correction, loss)
    assert found.startswith(key)
    assert not check_objective(BETWEEN, LossConfig(name="reinforce"))
