"""Traps that corrections elsewhere have fallen into, one test each.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_rl.advantage import AdvantageConfig, group_advantages
from megatron_rl.correction.checks import check_correction, check_objective
from megatron_rl.loss import LossConfig, LossInputs, count_totals, policy_loss
from megatron_rl.rollout_correction import Correction, CorrectionConfig, RejectRule, WeightConfig, rollout_correction
from megatron_rl.translate import translate

LOG2 = math.log(2.0)


def corrected(d: list[list[float]], mask: list[list[int]] | None = None, **config: object) -> Correction:
    """The correction for given log-ratios."""
    d_BT = torch.tensor(d)
    mask_BT = torch.ones_like(d_BT) if mask is None else torch.tensor(mask)
    mu_BT = torch.full_like(d_BT, -2.0)
    return rollout_correction(mu_BT + d_BT, mu_BT, mask_BT.bool(), CorrectionConfig(**config))  # type: ignore[arg-type]


def inputs_for(correction: Correction, advantages: list[float], **changes: torch.Tensor) -> LossInputs:
    source = correction.source
    assert source.prox_logprobs_BT is not None
    found = LossInputs(
        logprobs_BT=source.prox_logprobs_BT.clone().requires_grad_(),
        anchor_logprobs_BT=source.prox_logprobs_BT,
        sampler_logprobs_BT=source.sampler_logprobs_BT,
        ref_logprobs_BT=None,
        entropy_BT=None,
        advantages_B=torch.tensor(advantages),
        weights_BT=correction.weights_BT,
        mask_BT=correction.mask_BT,
        denominator_mask_BT=correction.denominator_mask_BT,
        prompt_ids_B=torch.zeros(len(advantages), dtype=torch.int64),
        selected_BT=torch.zeros_like(correction.mask_BT),
    )
    return replace(found, **changes)


def test_bounds_are_on_the_named_stat_not_on_its_inverse() -> None:
    """rho 2 and rho 1/2: a cap on the ratio rejects the first, a cap on k1 = -d the second."""
    d = [[LOG2], [-LOG2]]
    ratio = RejectRule(stat="ratio", reduce="mean", high=1.5)
    assert corrected(d, reject=[ratio]).mask_BT[:, 0].tolist() == [False, True]
    k1 = RejectRule(stat="k1", reduce="mean", high=0.5)
    assert corrected(d, reject=[k1]).mask_BT[:, 0].tolist() == [True, False]
    (rule,) = translate("verl", {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_1.25"}).config.reject
    assert (rule.low, rule.high) == (pytest.approx(0.8), pytest.approx(2.0))


def test_kl_is_from_the_sampler_to_the_learner() -> None:
    """Sampler (0.9, 0.1), learner (0.5, 0.5): 0.368 nats one way, 0.511 the other."""
    mu, p = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    drawn = torch.tensor([0] * 9 + [1])
    found = rollout_correction(p[drawn][None], mu[drawn][None], torch.ones(1, 10), CorrectionConfig())
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert found.metrics["rollout_corr/kl"] == pytest.approx(forward, abs=1e-5)
    assert found.metrics["rollout_corr/k3_kl"] == pytest.approx(forward, abs=1e-5)


def test_a_sequence_weight_says_whether_it_is_a_product_or_a_mean() -> None:
    d = [[0.1, 0.2, 0.3]]
    product = corrected(d, weight=WeightConfig(level="sequence", high=None))
    geometric = corrected(d, weight=WeightConfig(level="sequence", aggregate="geometric", high=None))
    assert float(product.weights_BT[0, 0]) == pytest.approx(math.exp(0.6))
    assert float(geometric.weights_BT[0, 0]) == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nan_times_zero_in_padding(garbage: float) -> None:
    mask = [[1, 1, 0]]
    clean = corrected([[0.1, -0.1, 0.0]], mask)
    dirty = corrected([[0.1, -0.1, garbage]], mask)
    assert torch.equal(clean.weights_BT, dirty.weights_BT)
    assert clean.metrics == dirty.metrics
    for name in ("ppo", "gspo", "gmpo", "reinforce", "kl_cov"):
        inputs = inputs_for(dirty, [1.0])
        loss, _ = policy_loss(inputs, LossConfig(name=name))
        assert math.isfinite(float(loss.detach()))
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
        assert gradient[0, 2] == 0.0
        assert bool(torch.isfinite(gradient).all())


def test_a_geometric_mask_keeps_no_row_without_a_mean() -> None:
    rule = RejectRule(stat="ratio", reduce="mean", low=0.5, high=2.0)
    for non_finite, rows in (("drop", [True, True]), ("reject", [True, False])):
        d = [[0.1, 0.1], [math.nan, 0.1]]
        mu_BT = torch.full((2, 2), -2.0)
        found = rollout_correction(
            mu_BT, mu_BT - torch.tensor(d), torch.ones(2, 2), CorrectionConfig(reject=[rule], non_finite=non_finite)
        )
        assert not found.mask_BT[1, 0]
        assert found.mask_BT.any(1).tolist() == rows
    all_nan = corrected([[math.nan, math.nan]], reject=[rule])
    assert not all_nan.mask_BT.any()


def test_absurd_logprobs_cannot_cancel_into_a_weight() -> None:
    """Finite differences whose row sum is inf - inf."""
    d = [[3e38, 3e38, -3e38, -3e38] * 32]
    for level in ("token", "sequence"):
        found = corrected(d, weight=WeightConfig(level=level))
        assert not found.mask_BT.any()
        assert all(math.isfinite(value) for value in found.metrics.values())


def test_minus_infinity_is_not_weight_one() -> None:
    """-inf - -inf is NaN, and NaN through nan_to_num(0) would be exp(0) = 1."""
    minus = torch.tensor([[-math.inf, -1.0]])
    for prox_BT, mu_BT in ((minus, minus), (minus, minus.nan_to_num(neginf=-1.0)), (torch.full((1, 2), -1.0), minus)):
        found = rollout_correction(prox_BT, mu_BT, torch.ones(1, 2), CorrectionConfig())
        assert found.weights_BT.tolist() == [[0.0, 1.0]]
        assert found.denominator_mask_BT.tolist() == [[False, True]]


def test_an_all_masked_micro_batch_does_not_raise() -> None:
    found = corrected([[0.1, 0.2]], [[0, 0]])
    loss, metrics = policy_loss(inputs_for(found, [1.0]), LossConfig())
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(metrics["loss/empty_microbatches"]) == 1.0


def test_normalisation_is_global_and_losses_do_not_know_their_micro_batch() -> None:
    found = corrected([[0.5, 0.5], [-0.5, -0.5]], weight=WeightConfig(normalize=True))
    assert float(found.weights_BT.mean()) == pytest.approx(1.0)
    assert float(found.weights_BT[0].mean()) > 1.1  # rows are not normalised by themselves
    inputs = inputs_for(found, [1.0, -2.0])
    totals = count_totals(found.denominator_mask_BT, inputs.prompt_ids_B, horizon=2)
    parts = [
        policy_loss(
            LossInputs(**{k: None if v is None else v[i : i + 1] for k, v in vars(inputs).items()}),
            LossConfig(),
            totals,
        )[0]
        for i in range(2)
    ]
    torch.testing.assert_close(parts[0] + parts[1], policy_loss(inputs, LossConfig(), totals)[0])


def test_a_rejected_row_does_not_move_its_siblings() -> None:
    rule = RejectRule(stat="ratio", reduce="max", high=2.0)
    config = CorrectionConfig(reject=[rule])
    found = corrected([[0.0], [0.0], [3.0]], reject=[rule])
    for reward in (0.0, 100.0):
        rewards_N = torch.tensor([1.0, 0.0, reward])
        advantages_N, _ = group_advantages(
            rewards_N, torch.zeros(3), found.baseline_keep_B(config), AdvantageConfig("dr_grpo")
        )
        assert advantages_N.tolist() == [0.5, -0.5, 0.0]


def test_padding_is_in_no_minimum_and_no_deviation() -> None:
    mask = [[1, 1, 0, 0]]
    found = corrected([[0.5, 0.5, 0.0, 0.0]], mask, weight=WeightConfig(high=None)).metrics
    for name in ("rho", "rollout_is"):
        assert found[f"rollout_corr/{name}_min"] == pytest.approx(math.exp(0.5))
        assert found[f"rollout_corr/{name}_max"] == pytest.approx(math.exp(0.5))
        assert found[f"rollout_corr/{name}_std"] == pytest.approx(0.0, abs=1e-3)
    below = corrected([[-0.5, -0.5, 0.0, 0.0]], mask, weight=WeightConfig(high=None)).metrics
    assert below["rollout_corr/rho_max"] == pytest.approx(math.exp(-0.5))
    assert found["rollout_corr/logp_abs_diff_std"] == pytest.approx(0.0, abs=1e-3)
    empty_row = corrected([[0.5, 0.5], [0.0, 0.0]], [[1, 1], [0, 0]]).metrics
    assert empty_row["rollout_corr/log_ppl_diff"] == pytest.approx(-0.5)
    assert empty_row["rollout_corr/training_ppl"] == pytest.approx(math.exp(1.5), rel=1e-5)


@pytest.mark.parametrize(("low", "high", "kept"), [(None, 1.5, [True, True, False]), (0.7, None, [False, True, True])])
def test_a_one_sided_bound_is_a_bound(low: float | None, high: float | None, kept: list[bool]) -> None:
    d = [[-LOG2], [0.0], [LOG2]]
    for level, reduce in (("token", None), ("sequence", "mean"), ("sequence", "min")):
        rule = RejectRule(level=level, stat="ratio", reduce=reduce, low=low, high=high)
        assert corrected(d, reject=[rule]).mask_BT[:, 0].tolist() == kept
    weights = corrected(d, weight=WeightConfig(low=low, high=high)).weights_BT[:, 0]
    assert weights.tolist() == pytest.approx([0.7 if low else 0.5, 1.0, 1.5 if high else 2.0])


def test_two_bounds_are_two_fields() -> None:
    """`0.5_5` is the number 0.55 to YAML and 5.5 hundredths to nobody; text where a number belongs is refused."""
    found = check_correction(CorrectionConfig(weight=WeightConfig(high="0.5_5")))  # type: ignore[arg-type]
    assert found == ["correction.weight.high is 0.5_5: give a finite number, or null for none"]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov", "ppo", "gspo", "gmpo", "cispo", "sapo", "dppo", "reinforce"])
def test_no_loss_ignores_the_weights(name: str) -> None:
    """Doubling every weight doubles the gradient."""
    found = corrected([[0.3, -0.2], [0.1, 0.4]])
    gradients = []
    for scale in (1.0, 2.0):
        inputs = inputs_for(found, [1.0, -1.0], weights_BT=found.weights_BT * scale)
        loss, _ = policy_loss(inputs, LossConfig(name=name))
        gradients.append(torch.autograd.grad(loss, inputs.logprobs_BT)[0])
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], 2.0 * gradients[0])


def test_no_weight_on_top_of_a_ratio_that_holds_it() -> None:
    config = CorrectionConfig(anchor="sampler", rebaseline=False, renormalize=False)
    assert "twice" in check_objective(config, LossConfig(), AdvantageConfig())[0]
    with pytest.raises(ValueError, match="already holds the mismatch"):
        policy_loss(inputs_for(corrected([[0.1]]), [1.0]), LossConfig(), None, config)


def test_no_cap_is_solved_where_the_sample_size_is_not_monotone() -> None:
    """Zeroing what is outside: raising the cap from 1.5 to 8 lets one large weight in and the ESS falls and rises."""
    d = [[0.0] * 8 + [math.log(8.0)] + [math.log(7.9)] * 8]
    sizes = [
        corrected(d, weight=WeightConfig(outside="zero", high=cap)).metrics["rollout_corr/rollout_is_eff_sample_size"]
        for cap in (1.5, 7.95, 8.05)
    ]
    assert sizes[1] > sizes[0]
    assert "monotone" in check_correction(CorrectionConfig(weight=WeightConfig(outside="zero", target_ess=0.9)))[0]


def test_products_shrink_with_length() -> None:
    """The same mismatch per token: at 16 tokens the product keeps its sample size, at 1,024 it is gone."""
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for length in (16, 1024):
        d_BT = 0.1 * torch.randn(256, length, generator=generator) - 0.005
        found = corrected(d_BT.tolist(), weight=WeightConfig(level="sequence", high=None))
        sizes.append(found.metrics["rollout_corr/rollout_is_eff_sample_size"])
    assert sizes[0] > 0.7
    assert sizes[1] < 0.1
