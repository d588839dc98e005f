"""Traps that corrections elsewhere have fallen into, one test each.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from loss_cases import BYPASS, LOG2, inputs_of, rows_of

from megatron_rl.advantage import AdvantageConfig, group_advantages
from megatron_rl.config.correction_rules import check_correction, check_objective
from megatron_rl.config.schema import LossName, Reduction
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.policy_loss import LossConfig, LossInputs, count_totals, policy_loss
from megatron_rl.rollout_correction import (
    Correction,
    CorrectionConfig,
    RejectRule,
    WeightConfig,
    apply_conditional_rules,
    keep_rows,
    ratio,
    rollout_correction,
)
from megatron_rl.rollout_correction.breakdown import breakdowns
from megatron_rl.rollout_correction.learner_reward import learner_reward
from megatron_rl.workshop.translation.translate import TranslationError, translate, translate_file

RATIO_LOSSES = [name for name in LossName if name not in ("reinforce", "cross_entropy")]


def corrected(d: list[list[float]], mask: list[list[int]] | None = None, **config: object) -> Correction:
    """The correction for given log-ratios."""
    d_BT = torch.tensor(d)
    mask_BT = torch.ones_like(d_BT) if mask is None else torch.tensor(mask)
    mu_BT = torch.full_like(d_BT, -2.0)
    return rollout_correction(mu_BT + d_BT, mu_BT, mask_BT.bool(), CorrectionConfig(**config))  # type: ignore[arg-type]


def inputs_for(correction: Correction, advantages: list[float], **changes: torch.Tensor) -> LossInputs:
    source = correction.source
    assert source.prox_logprobs_BT is not None
    prox_BT, mu_BT = source.prox_logprobs_BT, source.sampler_logprobs_BT
    found = inputs_of(prox_BT.clone().requires_grad_(), prox_BT, mu_BT, correction, torch.tensor(advantages))
    return replace(found, **{"selected_BT": torch.zeros_like(correction.mask_BT)} | changes)


def test_bounds_are_on_the_named_stat_not_on_its_inverse() -> None:
    """rho 2 and rho 1/2: a cap on the ratio rejects the first, a cap on k1 = -d the second."""
    d = [[LOG2], [-LOG2]]
    ratio = RejectRule(stat="ratio", reduce="mean", high=1.5)
    assert corrected(d, reject=[ratio]).mask_BT[:, 0].tolist() == [False, True]
    k1 = RejectRule(stat="k1", reduce="mean", high=0.5)
    assert corrected(d, reject=[k1]).mask_BT[:, 0].tolist() == [True, False]


@pytest.mark.parametrize("reduce", [None, "sum", "mean", "max", "min"])
def test_every_level_and_reduction_bounds_the_named_stat(reduce: str | None) -> None:
    """k1 is -0.69 and 0.69, its exponential 0.5 and 2: these bounds keep opposite rows."""
    level = "sequence" if reduce else "token"
    for rule in (
        RejectRule(level=level, stat="ratio", reduce=reduce, high=1.5),
        RejectRule(level=level, stat="k1", reduce=reduce, low=-0.6, high=1.0),
    ):
        assert corrected([[LOG2], [-LOG2]], reject=[rule]).mask_BT[:, 0].tolist() == [False, True]


def test_a_budget_masks_the_largest_of_the_named_stat() -> None:
    rule = RejectRule(level="token", stat="ratio", budget=1.0)
    assert corrected([[LOG2, -LOG2]], reject=[rule]).mask_BT.tolist() == [[False, True]]


@pytest.mark.parametrize(
    ("low", "high", "fractions"),
    [(0.5, 3.0, (0.5, 0.25)), (None, 3.0, (0.5, 0.25)), (0.5, None, (0.0, 0.25)), (None, None, (0.0, 0.0))],
)
def test_fractions_count_the_ratio_not_its_inverse(
    low: float | None, high: float | None, fractions: tuple[float, float]
) -> None:
    """Ratios 4, 4, 1/4, 1. Without a low, its mirror 1/3 is counted."""
    metrics = corrected([[2 * LOG2, 2 * LOG2, -2 * LOG2, 0.0]], weight=WeightConfig(low=low, high=high)).metrics
    names = [f"rollout_corr/rollout_is_ratio_fraction_{side}" for side in ("high", "low")]
    assert tuple(metrics[name] for name in names) == fractions


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_that_elsewhere_act_on_the_inverse_are_inverted(name: str) -> None:
    (rule,) = translate("verl", {"rollout_rs": name, "rollout_rs_threshold": "0.5_1.25"}).config.reject
    assert (rule.low, rule.high) == (pytest.approx(0.8), pytest.approx(2.0))


def test_kl_is_from_the_sampler_to_the_learner() -> None:
    """Sampler (0.9, 0.1), learner (0.5, 0.5): 0.368 nats one way, 0.511 the other."""
    mu, p = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    drawn = torch.tensor([0] * 9 + [1])
    found = rollout_correction(p[drawn][None], mu[drawn][None], torch.ones(1, 10), CorrectionConfig())
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert found.metrics["rollout_corr/kl"] == pytest.approx(forward, abs=1e-5)
    assert found.metrics["rollout_corr/k3_kl"] == pytest.approx(forward, abs=1e-5)
    part = breakdowns(p[drawn][None], mu[drawn][None], torch.ones(1, 10))[-1]
    assert (part.kl, part.k3_kl) == (pytest.approx(forward, abs=1e-5), pytest.approx(forward, abs=1e-5))


def test_a_k3_rule_has_the_same_direction() -> None:
    """rho 2: 2 - 1 - log 2 = 0.31; rho 1/2: 0.5 - 1 + log 2 = 0.19."""
    rule = RejectRule(stat="k3", reduce="mean", high=0.25)
    assert corrected([[LOG2], [-LOG2]], reject=[rule]).mask_BT[:, 0].tolist() == [False, True]


def test_perplexities_and_chi2_compare_the_learner_with_the_sampler() -> None:
    """One token twice as probable under the learner: half the perplexity; chi2 = 2^2 - 1."""
    metrics = corrected([[LOG2]]).metrics
    expected = {"log_ppl_diff": -LOG2, "ppl_ratio": 0.5, "chi2_token": 3.0, "chi2_seq": 3.0, "kl": -LOG2}
    assert {name: metrics[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_penalty_is_from_the_policy_to_the_reference(estimator: str) -> None:
    """Policy (0.9, 0.1), reference (0.5, 0.5), tokens drawn from the policy."""
    pi, other = torch.tensor([0.9, 0.1]).log(), torch.tensor([0.5, 0.5]).log()
    drawn = torch.tensor([0] * 9 + [1])
    found = rollout_correction(pi[drawn][None], pi[drawn][None], torch.ones(1, 10), CorrectionConfig())
    inputs = inputs_for(found, [1.0], ref_logprobs_BT=other[drawn][None], logprobs_BT=pi[drawn][None])
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    metrics = policy_loss(inputs, LossConfig(kl_coef=1.0, kl_estimator=estimator))[1]
    assert float(metrics["loss/kl"]) == pytest.approx(forward, abs=1e-5)
    moved = policy_loss(replace(inputs, logprobs_BT=other[drawn][None]), LossConfig())[1]
    assert float(moved["loss/approx_kl"]) == pytest.approx(forward, abs=1e-5)  # from the anchor to the policy


def test_a_binary_kl_is_from_the_anchor_to_the_policy() -> None:
    """0.9 to 0.5 is 0.368 nats and 0.511 the other way: a region of 0.44 lets the token in."""
    found = rollout_correction(torch.tensor([[0.9]]).log(), torch.zeros(1, 1), torch.ones(1, 1), CorrectionConfig())
    inputs = inputs_for(found, [-1.0], logprobs_BT=torch.tensor([[0.5]]).log())
    config = LossConfig(name="dppo", trust_region="binary_kl", clip_low=0.44)
    assert float(policy_loss(inputs, config)[1]["loss/clip_fraction_low"]) == 0.0


def test_a_sequence_weight_says_whether_it_is_a_product_or_a_mean() -> None:
    d = [[0.1, 0.2, 0.3]]
    product = corrected(d, weight=WeightConfig(level="sequence", high=None))
    geometric = corrected(d, weight=WeightConfig(level="sequence", aggregate="geometric", high=None))
    assert float(product.weights_BT[0, 0]) == pytest.approx(math.exp(0.6))
    assert float(geometric.weights_BT[0, 0]) == pytest.approx(math.exp(0.2))


@pytest.mark.parametrize(
    ("stat", "reduce", "value"),
    [("ratio", "sum", math.exp(0.6)), ("ratio", "mean", math.exp(0.2)), ("k1", "sum", -0.6), ("k1", "mean", -0.2)],
)
def test_a_sequence_rule_says_whether_it_is_a_sum_or_a_mean(stat: str, reduce: str, value: float) -> None:
    """The mean of the three ratios is 1.2255, the geometric one 1.2214; the fourth token is padding."""
    rule = RejectRule(stat=stat, reduce=reduce, low=value - 1e-3, high=value + 1e-3)
    assert corrected([[0.1, 0.2, 0.3, 9.0]], [[1, 1, 1, 0]], reject=[rule]).mask_BT.any()


def test_products_and_means_in_the_metrics_the_cap_and_the_losses() -> None:
    d = [[0.1, 0.2, 0.3], [0.0, 0.0, 0.0]]
    assert corrected(d[:1]).metrics["rollout_corr/chi2_seq"] == pytest.approx(math.exp(1.2) - 1, rel=1e-5)
    d_NT = torch.tensor(d)
    reward = learner_reward(torch.tensor([1.0, 0.0]), d_NT, 0 * d_NT, torch.ones(2, 3))
    assert reward["reward/learner_estimate"] == pytest.approx(math.exp(0.6) / (1 + math.exp(0.6)))
    solved = corrected([[0.2] * 4, [-0.2] * 4], weight=WeightConfig(level="sequence", target_ess=0.8, high=None))
    assert solved.metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.8, abs=1e-3)
    current = inputs_for(corrected([[0.0] * 3]), [1.0], logprobs_BT=torch.tensor(d[:1]) - 2.0)
    loss, _ = policy_loss(current, LossConfig(name="gspo", clip_high=10.0))
    assert float(loss) == pytest.approx(-math.exp(0.2))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_nan_times_zero_in_padding(garbage: float) -> None:
    """In either policy's padding, or in both: nothing changes, and no gradient is lost."""
    mask_BT = torch.tensor([[True, True, False]])
    mu_BT = torch.tensor([[-2.0, -2.0, -2.0]])
    prox_BT = mu_BT + torch.tensor([[0.1, -0.1, 0.0]])
    clean = rollout_correction(prox_BT, mu_BT, mask_BT, CorrectionConfig())
    bad_prox_BT, bad_mu_BT = (one_BT.masked_fill(~mask_BT, garbage) for one_BT in (prox_BT, mu_BT))
    for p_BT, m_BT in ((bad_prox_BT, mu_BT), (prox_BT, bad_mu_BT), (bad_prox_BT, bad_mu_BT)):
        dirty = rollout_correction(p_BT, m_BT, mask_BT, CorrectionConfig())
        assert torch.equal(clean.weights_BT, dirty.weights_BT)
        assert clean.metrics == dirty.metrics
        assert breakdowns(p_BT, m_BT, mask_BT) == breakdowns(prox_BT, mu_BT, mask_BT)
        ones = torch.ones(1)
        assert learner_reward(ones, p_BT, m_BT, mask_BT) == learner_reward(ones, prox_BT, mu_BT, mask_BT)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", list(LossName))
def test_nan_times_zero_in_the_losses(name: LossName, garbage: float) -> None:
    """Padding of every input, the weights included: same loss, metrics and gradient."""
    found = corrected([[0.1, -0.1, 0.0]], [[1, 1, 0]])
    config = LossConfig(name=name, kl_coef=0.1, entropy_coef=0.1)
    results = []
    for padding in (0.0, garbage):
        inputs = inputs_for(found, [1.0], selected_BT=torch.tensor([[True, False, True]]))
        extra = {"ref_logprobs_BT": torch.full((1, 3), -1.0), "entropy_BT": torch.ones(1, 3)}
        tensors = {key: value for key, value in vars(replace(inputs, **extra)).items() if value is not None}
        dirty = {
            key: value.detach().masked_fill(~found.mask_BT, padding)
            for key, value in tensors.items()
            if value.dim() == 2 and value.is_floating_point()
        }
        inputs = replace(inputs, **dirty, selected_BT=tensors["selected_BT"])
        inputs.logprobs_BT.requires_grad_()
        loss, metrics = policy_loss(inputs, config)
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
        results.append(([float(loss.detach())], gradient.tolist(), {key: float(m) for key, m in metrics.items()}))
    assert results[0] == results[1]


def test_nan_times_zero_in_advantages_and_selections() -> None:
    keep_N = torch.tensor([True, True, False])
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"):
        advantages_N, _ = group_advantages(
            torch.tensor([1.0, 0.0, math.nan]), torch.zeros(3), keep_N, AdvantageConfig(estimator)
        )
        assert bool(torch.isfinite(advantages_N).all()), estimator
    prox_BT = torch.tensor([[-1.0, -2.0, math.nan], [-3.0, -1.0, math.nan]])
    mask_BT = torch.isfinite(prox_BT)
    config = LossConfig(name="kl_cov", cov_fraction=0.25)
    selected_BT = select_by_covariance(prox_BT, torch.tensor([1.0, -1.0]), mask_BT, config, seed=0)
    assert selected_BT is not None
    assert selected_BT.tolist() == [[False, False, False], [True, False, False]]  # a low p, a low A


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


@pytest.mark.parametrize(("non_finite", "mean"), [("drop", 0.6), ("zero", 0.6), ("one", 0.3)])
def test_a_geometric_mean_is_over_the_tokens_that_have_a_ratio(non_finite: str, mean: float) -> None:
    rule = RejectRule(stat="ratio", reduce="mean", low=math.exp(mean) - 1e-3, high=math.exp(mean) + 1e-3)
    prox_BT, mu_BT = torch.tensor([[-1.0, -0.4]]), torch.tensor([[math.nan, -1.0]])
    for level in ("token", "sequence"):
        weight = WeightConfig(level=level, aggregate="geometric" if level == "sequence" else "product", high=None)
        found = rollout_correction(
            prox_BT, mu_BT, torch.ones(1, 2), CorrectionConfig(weight=weight, reject=[rule], non_finite=non_finite)
        )
        assert found.mask_BT[0, 1], level
        assert float(found.weights_BT[0, 1]) == pytest.approx(math.exp(0.6 if level == "token" else mean))


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


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("non_finite", "weights", "counted"),
    [("drop", [0, 1], [0, 1]), ("zero", [0, 1], [1, 1]), ("reject", [0, 0], [0, 0]), ("one", [1, 1], [1, 1])],
)
def test_a_token_without_a_ratio_weighs_what_the_policy_says(
    value: float, non_finite: str, weights: list[int], counted: list[int]
) -> None:
    """Whatever the weights are, and before the loss of `anchor: sampler` too."""
    mu_BT, ones_BT = torch.tensor([[value, -1.0]]), torch.ones(1, 2)
    for level in ("none", "token"):
        config = CorrectionConfig(weight=WeightConfig(level=level), non_finite=non_finite)
        for prox_BT in (-ones_BT, mu_BT.nan_to_num(-1.0, -1.0, -1.0)):
            found = rollout_correction(prox_BT, mu_BT, ones_BT, config)
            assert found.weights_BT.tolist() == [weights]
            assert found.denominator_mask_BT.tolist() == [[bool(one) for one in counted]]
            assert found.metrics["rollout_corr/non_finite_sampler"] == 1.0
    bypass = replace(BYPASS, non_finite=non_finite)
    before = rollout_correction(None, mu_BT, ones_BT, bypass)
    assert before.weights_BT.tolist() == [weights]
    inputs = inputs_for(corrected([[0.0, 0.0]]), [1.0], sampler_logprobs_BT=mu_BT, anchor_logprobs_BT=mu_BT)
    inputs = replace(inputs, mask_BT=before.mask_BT, denominator_mask_BT=before.denominator_mask_BT)
    loss, _ = policy_loss(inputs, LossConfig(clip_low=1.0, clip_high=10.0), None, bypass)
    (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
    # the policy's -2 over the sampler's -1, and over itself where the sampler reported nothing
    expected = [-weights[0] / max(1, sum(counted)), -weights[1] * math.exp(-1.0) / max(1, sum(counted))]
    assert gradient[0].tolist() == pytest.approx(expected)


def test_an_all_masked_micro_batch_does_not_raise() -> None:
    found = corrected([[0.1, 0.2]], [[0, 0]])
    loss, metrics = policy_loss(inputs_for(found, [1.0]), LossConfig())
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(metrics["loss/empty_microbatches"]) == 1.0


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("name", list(LossName))
def test_no_loss_and_no_reduction_raises_on_an_empty_mask(name: LossName, reduction: Reduction) -> None:
    """Alone, and as one part of a batch that holds tokens elsewhere or nowhere."""
    found = corrected([[0.1, 0.2]], [[0, 0]])
    for totals in (
        None,
        count_totals(found.denominator_mask_BT, torch.zeros(1), horizon=2),
        count_totals(torch.ones(1, 2).bool(), torch.zeros(1), horizon=2),
    ):
        inputs = inputs_for(found, [1.0])
        loss, metrics = policy_loss(inputs, LossConfig(name=name, reduction=reduction), totals)
        assert torch.autograd.grad(loss, inputs.logprobs_BT)[0].tolist() == [[0.0, 0.0]]
        assert all(math.isfinite(float(value)) for value in (loss.detach(), *metrics.values()))


@pytest.mark.parametrize("shape", [(1, 2), (0, 2), (2, 0)])
def test_no_correction_raises_on_an_empty_mask(shape: tuple[int, int]) -> None:
    rules = [
        RejectRule(stat="ratio", reduce="mean", low=0.9),
        RejectRule(level="token", stat="m2", budget=0.1),
        RejectRule(stat="k1", reduce="mean", high=0.1, when="negative_advantage"),
    ]
    nothing_BT, rows = torch.zeros(shape), shape[0]
    for weight in (
        WeightConfig(normalize=True),
        WeightConfig(level="sequence", normalize=True),
        WeightConfig(level="sequence", aggregate="geometric"),
        WeightConfig(target_ess=0.9),
    ):
        config = CorrectionConfig(weight=weight, reject=rules)
        found = rollout_correction(nothing_BT, nothing_BT, nothing_BT, config)
        found = apply_conditional_rules(keep_rows(found, torch.zeros(rows), config), -torch.ones(rows), config)
        assert found.weights_BT.tolist() == nothing_BT.tolist()
        assert {key for key, value in found.metrics.items() if value != 0.0} <= {"rollout_corr/cap"}
    assert found.metrics["rollout_corr/cap"] == 2.0
    inputs = inputs_for(found, [1.0] * rows)
    for totals in (None, count_totals(found.denominator_mask_BT, inputs.prompt_ids_B, horizon=1)):
        loss, metrics = policy_loss(inputs, LossConfig(), totals, BYPASS)
        assert all(math.isfinite(float(value)) for value in (loss.detach(), *metrics.values()))
    for name in ("clip_cov", "kl_cov"):
        selected_BT = select_by_covariance(nothing_BT, torch.ones(rows), nothing_BT, LossConfig(name=name), seed=0)
        assert selected_BT is not None
        assert not selected_BT.any()


def test_nothing_to_average_is_no_error_elsewhere() -> None:
    """Only tokens of weight 0 under a target sample size, nobody in a group, nobody at all."""
    config = CorrectionConfig(weight=WeightConfig(target_ess=0.9), non_finite="zero")
    nan_BT = torch.full((1, 2), math.nan)
    found = rollout_correction(torch.zeros(1, 2), nan_BT, torch.ones(1, 2), config)
    assert found.weights_BT.tolist() == [[0.0, 0.0]]
    for estimator in ("grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp"):
        advantages_N, _ = group_advantages(torch.ones(2), torch.zeros(2), torch.zeros(2), AdvantageConfig(estimator))
        assert advantages_N.tolist() == [0.0, 0.0]
        alone_N, _ = group_advantages(torch.ones(2), torch.zeros(2), torch.tensor([1, 0]), AdvantageConfig(estimator))
        assert alone_N.tolist() == [0.0, 0.0]
    assert learner_reward(torch.zeros(0), torch.zeros(0, 2), torch.zeros(0, 2), torch.zeros(0, 2)) == {}


def test_normalisation_is_global_and_losses_do_not_know_their_micro_batch() -> None:
    found = corrected([[0.5, 0.5], [-0.5, -0.5]], weight=WeightConfig(normalize=True))
    assert float(found.weights_BT.mean()) == pytest.approx(1.0)
    assert float(found.weights_BT[0].mean()) > 1.1  # rows are not normalised by themselves
    inputs = inputs_for(found, [1.0, -2.0])
    totals = count_totals(found.denominator_mask_BT, inputs.prompt_ids_B, horizon=2)
    parts = [policy_loss(rows_of(inputs, [row]), LossConfig(), totals)[0] for row in range(2)]
    torch.testing.assert_close(parts[0] + parts[1], policy_loss(inputs, LossConfig(), totals)[0])


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_parts_of_any_width_add_up_in_every_reduction(reduction: Reduction, bypass: bool) -> None:
    """Rows of three lengths, one part each, cut to its own width; the first two rows share a prompt."""
    found = corrected([[0.3, 0.1, 0.2], [-0.4, 0.0, 0.0], [0.2, -0.1, 0.0]], [[1, 1, 1], [1, 0, 0], [1, 1, 0]])
    inputs = inputs_for(found, [1.0, -2.0, 0.5], prompt_ids_B=torch.tensor([4, 4, 7]))
    if bypass:
        inputs = replace(inputs, weights_BT=found.mask_BT.float())
    correction = BYPASS if bypass else None
    config = LossConfig(reduction=reduction)
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, horizon=3)
    whole, whole_metrics = policy_loss(inputs, config, totals, correction)
    parts = []
    for row, width in ((1, 1), (0, 3), (2, 2)):
        parts.append(policy_loss(rows_of(inputs, [row], width), config, totals, correction))
    assert float(sum(loss.detach() for loss, _ in parts)) == pytest.approx(float(whole.detach()), abs=1e-6)
    for key in set(whole_metrics) - {"loss/empty_microbatches"}:
        assert float(sum(metrics[key] for _, metrics in parts)) == pytest.approx(float(whole_metrics[key]), abs=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        CorrectionConfig(weight=WeightConfig(normalize=True)),
        CorrectionConfig(weight=WeightConfig(level="sequence", normalize=True)),
        CorrectionConfig(weight=WeightConfig(target_ess=0.8, high=None)),
        CorrectionConfig(reject=[RejectRule(level="token", stat="m2", budget=0.3)]),
        CorrectionConfig(reject=[RejectRule(stat="k1", reduce="mean", high=0.1, when="negative_advantage")]),
    ],
)
def test_one_row_at_a_time_or_all_at_once(config: CorrectionConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are worked on in slices; the extremes and faults sit in the first, so the last alone would not do."""
    prox_BT = torch.tensor([[1.2, -1.5, math.nan], [0.9, 0.3, 0.1], [-0.8, 0.2, 0.0], [-0.3, 0.1, 0.0]])
    mu_BT = -torch.arange(12.0).view(4, 3) / 4
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 1, 0]]).bool()
    prox_BT = prox_BT + mu_BT
    mu_BT[0, 1], mu_BT[1, 2] = math.nan, math.inf
    results = []
    for elements in (1 << 16, 1):
        monkeypatch.setattr(ratio, "CHUNK_ELEMENTS_HOST", elements)
        found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
        fewer = keep_rows(found, torch.tensor([True, True, True, False]), config)
        results.append((found, apply_conditional_rules(fewer, torch.tensor([1.0, 2.0, -1.0, -3.0]), config)))
    for whole, sliced in zip(*results, strict=True):
        torch.testing.assert_close(sliced.weights_BT, whole.weights_BT)
        assert torch.equal(sliced.mask_BT, whole.mask_BT)
        assert sliced.metrics == pytest.approx(whole.metrics, rel=1e-5, abs=1e-6)


def test_weights_average_one_over_what_is_kept() -> None:
    """Tokens or rows, of those that are kept, and again when rows leave."""
    d, mask = [[0.4, 0.0, 0.0], [-0.3, -0.3, -0.3], [0.9, 0.9, 0.0]], [[1, 0, 0], [1, 1, 1], [1, 1, 0]]
    for level in ("token", "sequence"):
        config = CorrectionConfig(weight=WeightConfig(level=level, high=None, normalize=True))
        found = corrected(d, mask, weight=config.weight)
        narrowed = keep_rows(found, torch.tensor([True, True, False]), config)
        for one in (found, narrowed):
            mean = (
                one.weights_BT[one.mask_BT].mean() if level == "token" else one.weights_BT[one.mask_BT[:, 0], 0].mean()
            )
            assert float(mean) == pytest.approx(1.0)
        assert narrowed.metrics["rollout_corr/rollout_is_max"] == pytest.approx(float(narrowed.weights_BT.max()))


def test_selected_tokens_do_not_depend_on_padding() -> None:
    prox_BT, advantages_B = torch.tensor([[-1.0, -2.0], [-5.0, -4.0]]), torch.tensor([3.0, 1.0])
    config = LossConfig(name="kl_cov", cov_fraction=0.5)
    narrow_BT = select_by_covariance(prox_BT, advantages_B, torch.ones(2, 2), config, seed=0)
    wide_BT = select_by_covariance(
        torch.cat([prox_BT, torch.zeros(2, 6)], 1),
        advantages_B,
        torch.cat([torch.ones(2, 2), torch.zeros(2, 6)], 1),
        config,
        seed=0,
    )
    assert narrow_BT is not None and wide_BT is not None
    assert narrow_BT.tolist() == [[True, False], [True, False]]
    assert wide_BT[:, :2].tolist() == narrow_BT.tolist()


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


@pytest.mark.parametrize(
    ("estimator", "size"),
    [("grpo", 0.5**0.5), ("dr_grpo", 0.5), ("rloo", 1.0), ("maxrl", 1.0), ("reinforce_pp", 0.5**0.5)],
)
def test_no_estimator_looks_at_a_rejected_row(estimator: str, size: float) -> None:
    """Survivors 1 and 0: mean 0.5, deviation 0.707."""
    for reward in (0.0, 0.5, 100.0, math.nan):
        advantages_N, _ = group_advantages(
            torch.tensor([1.0, 0.0, reward]), torch.zeros(3), torch.tensor([1, 1, 0]), AdvantageConfig(estimator)
        )
        assert advantages_N.tolist() == pytest.approx([size, -size, 0.0], abs=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl"])
def test_a_group_of_one_survivor_is_dropped(estimator: str) -> None:
    advantages_N, keep_N = group_advantages(
        torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3), torch.tensor([1, 0, 0]), AdvantageConfig(estimator)
    )
    assert (advantages_N.tolist(), keep_N.tolist()) == ([0.0] * 3, [False] * 3)


def test_conditional_rules_move_no_baseline() -> None:
    rule = RejectRule(stat="ratio", reduce="max", high=2.0, when="negative_advantage")
    config = CorrectionConfig(reject=[rule])
    found = corrected([[0.0], [3.0]], reject=[rule])
    assert found.baseline_keep_B(config).tolist() == [True, True]
    after = apply_conditional_rules(found, torch.tensor([1.0, -1.0]), config)
    assert after.mask_BT[:, 0].tolist() == [True, False]


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


def test_padding_and_empty_rows_change_no_metric() -> None:
    """Ragged rows and an empty one against the same tokens in one row after another."""
    advantages_B = torch.tensor([1.0, -1.0, 2.0])
    d = [[0.5, -0.3, 0.2, 9.0], [-0.6, 9.0, 9.0, 9.0], [9.0] * 4]
    mask = [[1, 1, 1, 0], [1, 0, 0, 0], [0] * 4]
    config = CorrectionConfig(weight=WeightConfig(high=1.3))
    padded = apply_conditional_rules(corrected(d, mask, weight=config.weight), advantages_B, config).metrics
    tight = [corrected([[0.5, -0.3, 0.2]], weight=config.weight), corrected([[-0.6]], weight=config.weight)]
    for name in ("kl", "k3_kl", "mult_prob_error", "probs_diff_mean", "rho_mean", "rollout_is_mean"):
        key = f"rollout_corr/{name}"
        assert padded[key] == pytest.approx((3 * tight[0].metrics[key] + tight[1].metrics[key]) / 4, abs=1e-6), name
    for name in ("training_ppl", "rollout_ppl", "log_ppl_diff", "log_ppl_abs_diff", "ppl_ratio", "chi2_seq"):
        key = f"rollout_corr/{name}"
        assert padded[key] == pytest.approx((tight[0].metrics[key] + tight[1].metrics[key]) / 2, rel=1e-5), name
    p, mu = torch.tensor([0.5, -0.3, 0.2, -0.6]).sub(2.0).exp(), torch.tensor(-2.0).exp()
    assert padded["rollout_corr/probs_diff_std"] == pytest.approx(float((p - mu).abs().std(correction=0)), abs=1e-6)
    assert padded["rollout_corr/probs_diff_max"] == pytest.approx(float((p - mu).abs().max()), rel=1e-5)
    weights = torch.tensor([1.3, math.exp(-0.3), math.exp(0.2), math.exp(-0.6)])
    assert padded["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(
        float(weights.sum() ** 2 / weights.square().sum() / 4), rel=1e-5
    )
    assert padded["rollout_corr/rollout_is_ratio_fraction_high"] == 0.25


def test_padding_does_not_correlate() -> None:
    """Probabilities that move against each other: zeros of the padding would pull the correlation up."""
    mu_BT = torch.tensor([[0.4, 0.5, 0.6, 1e-9, 1e-9]]).log()
    prox_BT = torch.tensor([[0.6, 0.5, 0.4, 1e-9, 1e-9]]).log()
    metrics = rollout_correction(prox_BT, mu_BT, torch.tensor([[1, 1, 1, 0, 0]]), CorrectionConfig()).metrics
    assert metrics["rollout_corr/probs_pearson_corr"] == pytest.approx(-1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("stat", "reduce", "value"),
    [
        ("ratio", "min", 2.0),
        ("k1", "max", -LOG2),
        ("abs", "mean", 2.0),
        ("abs", "sum", 4.0),
        ("m2", "mean", LOG2**2),
        ("k3", "min", 1.0 - LOG2),
    ],
)
def test_padding_is_in_no_statistic_of_a_rule(stat: str, reduce: str, value: float) -> None:
    """Two tokens of ratio 2, then padding, where the ratio is 1."""
    rule = RejectRule(stat=stat, reduce=reduce, low=value - 1e-3, high=value + 1e-3)
    assert corrected([[LOG2, LOG2, 0.0, 0.0]], [[1, 1, 0, 0]], reject=[rule]).mask_BT.any()


def test_loss_metrics_count_no_padding() -> None:
    """Both tokens at ratio e, above the clip; the padding, at ratio 1 or e, is not counted."""
    found = corrected([[0.0] * 4], [[1, 1, 0, 0]])
    inputs = inputs_for(found, [1.0], logprobs_BT=torch.full((1, 4), -1.0))
    metrics = policy_loss(inputs, LossConfig(name="cispo"))[1]
    assert float(metrics["loss/clip_fraction_high"]) == 1.0
    assert float(metrics["loss/ratio_mean"]) == pytest.approx(math.e)
    assert float(metrics["loss/approx_kl"]) == pytest.approx(-1.0)
    selected_BT = torch.tensor([[True, False, True, True]])
    metrics = policy_loss(replace(inputs, selected_BT=selected_BT), LossConfig(name="kl_cov"))[1]
    assert float(metrics["loss/selected_fraction"]) == 0.5


@pytest.mark.parametrize(("low", "high", "kept"), [(None, 1.5, [True, True, False]), (0.7, None, [False, True, True])])
def test_a_one_sided_bound_is_a_bound(low: float | None, high: float | None, kept: list[bool]) -> None:
    d = [[-LOG2], [0.0], [LOG2]]
    for level, reduce in (("token", None), ("sequence", "mean"), ("sequence", "min")):
        rule = RejectRule(level=level, stat="ratio", reduce=reduce, low=low, high=high)
        assert corrected(d, reject=[rule]).mask_BT[:, 0].tolist() == kept
        later = RejectRule(level=level, stat="ratio", reduce=reduce, low=low, high=high, when="negative_advantage")
        found = apply_conditional_rules(corrected(d, reject=[later]), -torch.ones(3), CorrectionConfig(reject=[later]))
        assert found.mask_BT[:, 0].tolist() == kept
    for level in ("token", "sequence"):
        weights = corrected(d, weight=WeightConfig(level=level, low=low, high=high)).weights_BT[:, 0]
        assert weights.tolist() == pytest.approx([0.7 if low else 0.5, 1.0, 1.5 if high else 2.0])
        zeroed = corrected(d, weight=WeightConfig(level=level, low=low, high=high, outside="zero")).weights_BT[:, 0]
        assert zeroed.tolist() == pytest.approx([0.0 if low else 0.5, 1.0, 0.0 if high else 2.0])


def test_a_bound_of_zero_is_a_bound() -> None:
    """k1 of the two rows: -0.69 and 0.69."""
    for bounds, kept in (({"low": 0.0}, [False, True]), ({"high": 0.0}, [True, False])):
        rule = RejectRule(stat="k1", reduce="mean", **bounds)
        assert corrected([[LOG2], [-LOG2]], reject=[rule]).mask_BT[:, 0].tolist() == kept


def test_a_one_sided_bound_of_others_is_translated_or_refused() -> None:
    (low,) = translate("skyrl", {"outlier_token_is_threshold_low": 0.1}).config.reject
    (high,) = translate("skyrl", {"outlier_token_is_threshold_high": 9.0}).config.reject
    assert [(rule.reduce, rule.low, rule.high) for rule in (low, high)] == [("min", 0.1, None), ("max", None, 9.0)]
    for side in ("low", "high"):
        with pytest.raises(TranslationError, match="ignores one bound"):
            translate("skyrl", {f"token_mask_is_threshold_{side}": 0.5})


def test_two_bounds_are_two_fields() -> None:
    """`0.5_5` is the number 0.55 to YAML and 5.5 hundredths to nobody; text where a number belongs is refused."""
    found = check_correction(CorrectionConfig(weight=WeightConfig(high="0.5_5")))  # type: ignore[arg-type]
    assert found == ["correction.weight.high is 0.5_5: give a finite number, or null for none"]


def test_underscores_of_others_are_never_digit_separators(tmp_path: Path) -> None:
    weight = translate("verl", {"rollout_is": "token", "rollout_is_threshold": "0.5_5"}).config.weight
    assert (weight.outside, weight.low, weight.high) == ("zero", 0.5, 5.0)
    source = tmp_path / "verl.yaml"
    source.write_text("rollout_is: token\nrollout_is_threshold: 0.5_5\n")
    assert "high: 5.0" in translate_file("verl", source)
    with pytest.raises(TranslationError, match="expected a number"):
        translate("skyrl", {"tis_ratio_type": "token", "token_tis_ratio_clip_high": "0.5_5"})


@pytest.mark.parametrize("name", list(LossName))
def test_no_loss_ignores_the_weights(name: LossName) -> None:
    """Doubling every weight doubles the loss and the gradient, of selected tokens and of the others."""
    found = corrected([[0.3, -0.2], [0.1, 0.4]])
    losses, gradients = [], []
    for scale in (1.0, 2.0):
        inputs = inputs_for(found, [1.0, -2.0], weights_BT=found.weights_BT * scale)
        inputs = replace(inputs, selected_BT=torch.tensor([[True, False], [False, True]]))
        inputs = replace(inputs, anchor_logprobs_BT=inputs.anchor_logprobs_BT - 0.1)
        loss, _ = policy_loss(inputs, LossConfig(name=name, cov_kl_coef=3.0))
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, inputs.logprobs_BT)[0])
    assert gradients[0].any()
    assert losses[1] == pytest.approx(2.0 * losses[0])
    torch.testing.assert_close(gradients[1], 2.0 * gradients[0])


@pytest.mark.parametrize("name", list(LossName))
def test_no_loss_trains_on_a_rejected_token(name: LossName) -> None:
    """The second token is out of the mask and still in the denominators; its weight is not looked at."""
    found = corrected([[0.3, -0.2], [0.1, 0.4]])
    mask_BT = torch.tensor([[True, False], [True, True]])
    gradients = []
    for advantage in (1.0, -1.0):
        inputs = inputs_for(found, [advantage, -1.0], mask_BT=mask_BT, selected_BT=torch.ones(2, 2))
        loss, metrics = policy_loss(inputs, LossConfig(name=name))
        gradients.append(torch.autograd.grad(loss, inputs.logprobs_BT)[0])
        assert gradients[-1][0, 1] == 0.0
        assert float(metrics["loss/trained_fraction"]) == 0.75
        assert float(metrics.get("loss/selected_fraction", 0.75)) == 0.75


@pytest.mark.parametrize(("name", "fraction"), [("clip_cov", 1.0), ("kl_cov", 0.34)])
def test_no_selection_looks_at_a_rejected_token(name: str, fraction: float) -> None:
    """By hand: p -1, -2, -3 and A -2, -2, 1 leave covariances -1, 0 and -2.

    With p and A of 0, as padding is filled, a rejected token would reach 2.
    """
    prox_BT, advantages_B = torch.tensor([[-1.0, -2.0], [-3.0, -60.0], [-90.0, -0.1]]), torch.tensor([-2.0, 1.0, 50.0])
    mask_BT = torch.tensor([[True, True], [True, False], [False, False]])
    config = LossConfig(name=name, cov_fraction=fraction, cov_low=-0.5, cov_high=2.5)
    selected_BT = select_by_covariance(prox_BT, advantages_B, mask_BT, config, seed=0)
    assert selected_BT is not None
    assert selected_BT.tolist() == [[False, True], [False, False], [False, False]]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_no_weight_on_top_of_a_ratio_that_holds_it(name: LossName, level: str) -> None:
    config = replace(BYPASS, weight=WeightConfig(level=level))
    assert "twice" in check_objective(config, LossConfig(name=name), AdvantageConfig())[0]
    with pytest.raises(ValueError, match="already holds the mismatch"):
        policy_loss(inputs_for(corrected([[0.1]]), [1.0]), LossConfig(name=name), None, config)


def test_a_weight_of_others_that_only_their_metrics_see_is_left_out() -> None:
    config, _ = translate("verl", {"bypass_mode": True, "rollout_is": "token"})
    assert config.weight.level == "none"


def test_no_cap_is_solved_where_the_sample_size_is_not_monotone() -> None:
    """Zeroing what is outside: one large weight comes in and the ESS falls, eight larger ones and it rises."""
    d = [[0.0] * 8 + [math.log(8.0)] + [math.log(9.0)] * 8]
    sizes = [
        corrected(d, weight=WeightConfig(outside="zero", high=cap)).metrics["rollout_corr/rollout_is_eff_sample_size"]
        for cap in (1.5, 8.5, 9.5)
    ]
    assert sizes == pytest.approx([8 / 17, 16**2 / (17 * 72), 88**2 / (17 * 720)])
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
