"""Traps that corrections elsewhere have fallen into, and edges where a comparison or a default
decides: values by hand.

What the oracle sees too is in its own tests.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loss_cases import BYPASS, LOG2, batch_of, corrected, inputs_for, inputs_of

from megatron_rl.advantage import AdvantageConfig, group_advantages
from megatron_rl.config.correction_rules import check_correction, check_objective
from megatron_rl.config.schema import (
    CorrectionConfig,
    Format,
    LossName,
    Reduce,
    Reduction,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.policy_loss import LossConfig, LossInputs, count_totals, policy_loss
from megatron_rl.loss.table import LOSSES
from megatron_rl.rollout_correction.breakdown import breakdowns, mismatch_by_age, mismatch_by_format
from megatron_rl.rollout_correction.correction import (
    apply_conditional_rules,
    keep_rows,
    rollout_correction,
)
from megatron_rl.rollout_correction.estimates import learner_reward

RATIO_LOSSES = [name for name in LossName if LOSSES[name].ratio]


@pytest.mark.parametrize(
    ("stat", "reduces", "bounds", "kept"),
    [
        ("ratio", (None, "sum", "mean", "max", "min"), {"high": 1.5}, [False, True]),
        ("k1", (None, "sum", "mean", "max", "min"), {"low": -0.6, "high": 1.0}, [False, True]),
        ("k1", ("mean",), {"high": 0.5}, [True, False]),
        ("k1", ("mean",), {"low": 0.0}, [False, True]),  # a bound of zero is a bound
        ("k1", ("mean",), {"high": 0.0}, [True, False]),
        (
            "k3",
            ("mean",),
            {"high": 0.25},
            [False, True],
        ),  # 2 - 1 - log 2 = 0.31 and 0.5 - 1 + log 2 = 0.19
    ],
)
def test_bounds_are_on_the_named_stat_not_on_its_inverse(
    stat: str, reduces: tuple[str | None, ...], bounds: dict[str, float], kept: list[bool]
) -> None:
    """rho 2 and rho 1/2, whose k1 = -d are -0.69 and 0.69."""
    for reduce in reduces:
        rule = RejectRule(
            level="sequence" if reduce else "token", stat=stat, reduce=reduce, **bounds
        )
        assert corrected([[LOG2], [-LOG2]], reject=[rule]).mask_BT[:, 0].tolist() == kept, reduce


@pytest.mark.parametrize(
    ("low", "high", "fractions"),
    [
        (0.5, 3.0, (0.5, 0.25)),
        (None, 3.0, (0.5, 0.25)),
        (0.5, None, (0.0, 0.25)),
        (None, None, (0.0, 0.0)),
    ],
)
def test_fractions_count_the_ratio_not_its_inverse(
    low: float | None, high: float | None, fractions: tuple[float, float]
) -> None:
    """Ratios 4, 4, 1/4, 1. Without a low, its mirror 1/3 is counted."""
    metrics = corrected(
        [[2 * LOG2, 2 * LOG2, -2 * LOG2, 0.0]], weight=WeightConfig(low=low, high=high)
    ).metrics
    names = [f"rollout_corr/rollout_is_ratio_fraction_{side}" for side in ("high", "low")]
    assert tuple(metrics[name] for name in names) == fractions


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_penalty_is_from_the_policy_to_the_reference(estimator: str) -> None:
    """Policy (0.9, 0.1), reference (0.5, 0.5), tokens drawn from the policy."""
    pi = torch.tensor([0.9, 0.1]).log()
    other = torch.tensor([0.5, 0.5]).log()
    drawn = torch.tensor([0] * 9 + [1])
    found = rollout_correction(
        pi[drawn][None], pi[drawn][None], torch.ones(1, 10), CorrectionConfig()
    )
    inputs = inputs_for(
        found, [1.0], ref_logprobs_BT=other[drawn][None], logprobs_BT=pi[drawn][None]
    )
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    metrics = policy_loss(inputs, LossConfig(kl_coef=1.0, kl_estimator=estimator))[1]
    assert float(metrics["loss/kl"]) == pytest.approx(forward, abs=1e-5)
    moved = policy_loss(replace(inputs, logprobs_BT=other[drawn][None]), LossConfig())[1]
    # from the anchor to the policy
    assert float(moved["loss/approx_kl"]) == pytest.approx(forward, abs=1e-5)


def test_a_binary_kl_is_from_the_anchor_to_the_policy() -> None:
    """0.9 to 0.5 is 0.368 nats and 0.511 the other way: a region of 0.44 lets the token in."""
    found = rollout_correction(
        torch.tensor([[0.9]]).log(), torch.zeros(1, 1), torch.ones(1, 1), CorrectionConfig()
    )
    inputs = inputs_for(found, [-1.0], logprobs_BT=torch.tensor([[0.5]]).log())
    config = LossConfig(name="dppo", params={"trust_region": "binary_kl"}, clip_low=0.44)
    assert float(policy_loss(inputs, config)[1]["loss/clip_fraction_low"]) == 0.0


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
        assert learner_reward(ones, p_BT, m_BT, mask_BT) == learner_reward(
            ones, prox_BT, mu_BT, mask_BT
        )


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
        tensors = {
            key: value for key, value in vars(replace(inputs, **extra)).items() if value is not None
        }
        dirty = {
            key: value.detach().masked_fill(~found.mask_BT, padding)
            for key, value in tensors.items()
            if value.dim() == 2 and value.is_floating_point()
        }
        inputs = replace(inputs, **dirty, selected_BT=tensors["selected_BT"])
        inputs.logprobs_BT.requires_grad_()
        loss, metrics = policy_loss(inputs, config)
        (gradient,) = torch.autograd.grad(loss, inputs.logprobs_BT)
        results.append(
            (
                [float(loss.detach())],
                gradient.tolist(),
                {key: float(m) for key, m in metrics.items()},
            )
        )
    assert results[0] == results[1]


@pytest.mark.parametrize(("non_finite", "mean"), [("drop", 0.6), ("zero", 0.6), ("one", 0.3)])
def test_a_geometric_mean_is_over_the_tokens_that_have_a_ratio(
    non_finite: str, mean: float
) -> None:
    rule = RejectRule(
        stat="ratio", reduce="mean", low=math.exp(mean) - 1e-3, high=math.exp(mean) + 1e-3
    )
    prox_BT = torch.tensor([[-1.0, -0.4]])
    mu_BT = torch.tensor([[math.nan, -1.0]])
    for level in ("token", "sequence"):
        weight = WeightConfig(
            level=level, aggregate="geometric" if level == "sequence" else "product", high=None
        )
        found = rollout_correction(
            prox_BT,
            mu_BT,
            torch.ones(1, 2),
            CorrectionConfig(weight=weight, reject=[rule], non_finite=non_finite),
        )
        assert found.mask_BT[0, 1], level
        assert float(found.weights_BT[0, 1]) == pytest.approx(
            math.exp(0.6 if level == "token" else mean)
        )


def test_absurd_logprobs_cannot_cancel_into_a_weight() -> None:
    """Finite differences whose row sum is inf - inf."""
    d = [[3e38, 3e38, -3e38, -3e38] * 32]
    for level in ("token", "sequence"):
        found = corrected(d, weight=WeightConfig(level=level))
        assert not found.mask_BT.any()
        assert all(math.isfinite(value) for value in found.metrics.values())


@pytest.mark.parametrize("shape", [(1, 2), (0, 2), (2, 0), (0, 0)])
def test_no_correction_raises_on_an_empty_mask(shape: tuple[int, int]) -> None:
    rules = [
        *(RejectRule(stat="ratio", reduce=reduce, low=0.9) for reduce in Reduce),
        RejectRule(level="token", stat="m2", budget=0.1),
        RejectRule(stat="k1", reduce="mean", high=0.1, when="negative_advantage"),
    ]
    nothing_BT = torch.zeros(shape)
    rows = shape[0]
    for weight in (
        WeightConfig(normalize=True),
        WeightConfig(level="sequence", normalize=True),
        WeightConfig(level="sequence", aggregate="geometric"),
        WeightConfig(target_ess=0.9),
    ):
        config = CorrectionConfig(weight=weight, reject=rules)
        found = rollout_correction(nothing_BT, nothing_BT, nothing_BT, config)
        assert found.rejected_B.tolist() == found.baseline_keep_B(config).tolist() == [False] * rows
        found = apply_conditional_rules(
            keep_rows(found, torch.zeros(rows), config), -torch.ones(rows), config
        )
        assert found.weights_BT.tolist() == nothing_BT.tolist()
        assert {key for key, value in found.metrics.items() if value != 0.0} <= {"rollout_corr/cap"}
    assert found.metrics["rollout_corr/cap"] == 2.0
    inputs = inputs_for(found, [1.0] * rows)
    for totals in (None, count_totals(found.denominator_mask_BT, inputs.prompt_ids_B, horizon=1)):
        loss, metrics = policy_loss(inputs, LossConfig(), totals, BYPASS)
        assert all(math.isfinite(float(value)) for value in (loss.detach(), *metrics.values()))
    for name in ("clip_cov", "kl_cov"):
        selected_BT = select_by_covariance(
            nothing_BT, torch.ones(rows), nothing_BT, LossConfig(name=name), seed=0
        )
        assert selected_BT is not None
        assert not selected_BT.any()


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


@pytest.mark.parametrize("name", list(LossName))
def test_no_loss_trains_on_a_rejected_token(name: LossName) -> None:
    """The second token is out of the mask and still in the denominators; its weight is not looked
    at.
    """
    found = corrected([[0.3, -0.2], [0.1, 0.4]])
    mask_BT = torch.tensor([[True, False], [True, True]])
    gradients = []
    for advantage in (1.0, -1.0):
        inputs = inputs_for(found, [advantage, -1.0], mask_BT=mask_BT, selected_BT=torch.ones(2, 2))
        loss, metrics = policy_loss(inputs, LossConfig(name=name))
        gradients.append(torch.autograd.grad(loss, inputs.logprobs_BT)[0])
        assert gradients[-1][0, 1] == 0.0
        assert float(metrics["loss/trained_fraction"]) == 0.75
        assert float(metrics["loss/empty_microbatches"]) == 0.0
        assert float(metrics.get("loss/selected_fraction", 0.75)) == 0.75


@pytest.mark.parametrize(("name", "fraction"), [("clip_cov", 1.0), ("kl_cov", 0.34)])
def test_no_selection_looks_at_a_rejected_token(name: str, fraction: float) -> None:
    """By hand: p -1, -2, -3 and A -2, -2, 1 leave covariances -1, 0 and -2.

    With p and A of 0, as padding is filled, a rejected token would reach 2.
    """
    prox_BT = torch.tensor([[-1.0, -2.0], [-3.0, -60.0], [-90.0, -0.1]])
    advantages_B = torch.tensor([-2.0, 1.0, 50.0])
    mask_BT = torch.tensor([[True, True], [True, False], [False, False]])
    config = LossConfig(
        name=name, params={"cov_fraction": fraction, "cov_low": -0.5, "cov_high": 2.5}
    )
    selected_BT = select_by_covariance(prox_BT, advantages_B, mask_BT, config, seed=0)
    assert selected_BT is not None
    assert selected_BT.tolist() == [[False, True], [False, False], [False, False]]


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_no_weight_on_top_of_a_ratio_that_holds_it(name: LossName, level: str) -> None:
    config = replace(BYPASS, weight=WeightConfig(level=level))
    found, *_ = check_objective(config, LossConfig(name=name))
    assert found.startswith(f"correction.weight.level is {level}")
    assert check_objective(config, LossConfig(name="reinforce")) == []
    with pytest.raises(
        ValueError,
        match=r"correction\.weight\.level is .* already holds the mismatch; .*loss\.name: reinforce",
    ):
        policy_loss(inputs_for(corrected([[0.1]]), [1.0]), LossConfig(name=name), None, config)


def test_no_cap_is_solved_where_the_sample_size_is_not_monotone() -> None:
    """Zeroing what is outside: one large weight comes in and the ESS falls, eight larger ones and
    it rises.
    """
    d = [[0.0] * 8 + [math.log(8.0)] + [math.log(9.0)] * 8]
    sizes = [
        corrected(d, weight=WeightConfig(outside="zero", high=cap)).metrics[
            "rollout_corr/rollout_is_eff_sample_size"
        ]
        for cap in (1.5, 8.5, 9.5)
    ]
    assert sizes == pytest.approx([8 / 17, 16**2 / (17 * 72), 88**2 / (17 * 720)])
    assert (
        "monotone"
        in check_correction(CorrectionConfig(weight=WeightConfig(outside="zero", target_ess=0.9)))[
            0
        ]
    )


def test_products_shrink_with_length() -> None:
    """The same mismatch per token: at 16 tokens the product keeps its sample size, at 1,024 it is
    gone.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = []
    for length in (16, 1024):
        d_BT = 0.1 * torch.randn(256, length, generator=generator) - 0.005
        found = corrected(d_BT.tolist(), weight=WeightConfig(level="sequence", high=None))
        sizes.append(found.metrics["rollout_corr/rollout_is_eff_sample_size"])
    assert sizes[0] > 0.7
    assert sizes[1] < 0.1


def inputs(
    shift: list[list[float]], advantages: list[float], anchor: float = -2.0, **changes: object
) -> LossInputs:
    """A policy that moved by `shift` from the anchor; one token per row and column, each of weight
    1.
    """
    anchor_BT = torch.full_like(torch.tensor(shift), anchor)
    mask_BT = torch.ones_like(anchor_BT).bool()
    pi_BT = (anchor_BT + torch.tensor(shift)).requires_grad_()
    weights = SimpleNamespace(
        weights_BT=mask_BT.float(), mask_BT=mask_BT, denominator_mask_BT=mask_BT
    )
    found = inputs_of(pi_BT, anchor_BT, anchor_BT, weights, torch.tensor(advantages))
    return replace(found, **changes)  # type: ignore[arg-type]


# three tokens above the band, two below, three inside
UP_AND_DOWN = [
    1.0,
    1.0,
    1.0,
    -1.0,
    -1.0,
    0.0,
    0.0,
    0.0,
]
DOUBLED = [LOG2 * size for size in UP_AND_DOWN]  # a probability of 0.135 doubles or halves
NARROW = {"clip_low": 0.05, "clip_high": 0.05}


@pytest.mark.parametrize(
    ("names", "keys", "shift", "by_advantage"),
    [
        # bounds that only stop what gains, bounds on the ratio itself, and a trust region
        (("ppo", "gmpo"), {}, UP_AND_DOWN, {1.0: (0.375, 0.0), -1.0: (0.0, 0.25), 0.0: (0.0, 0.0)}),
        (("cispo", "rollout_is"), {}, UP_AND_DOWN, {1.0: (0.375, 0.25), -1.0: (0.375, 0.25)}),
        (("dppo",), NARROW, DOUBLED, {1.0: (0.375, 0.0), -1.0: (0.0, 0.25)}),
        # bounds that a ratio of one touches: it is clipped from outside the band, or from an open
        # band's edge on
        (("cispo", "ppo"), {"clip_low": 0.0, "clip_high": 0.0}, [0.0], {1.0: (0.0, 0.0)}),
        (("rollout_is",), {"clip_low": 0.0, "clip_high": 0.5}, [0.0], {1.0: (0.0, 1.0)}),
        (("rollout_is",), {"clip_low": 0.5, "clip_high": 0.0}, [0.0], {1.0: (1.0, 0.0)}),
    ],
)
def test_clip_fractions(
    names: tuple[str, ...],
    keys: dict[str, float],
    shift: list[float],
    by_advantage: dict[float, tuple[float, float]],
) -> None:
    for name, (advantage, wanted) in itertools.product(names, by_advantage.items()):
        metrics = policy_loss(inputs([shift], [advantage]), LossConfig(name=name, **keys))[1]  # type: ignore[arg-type]
        found = tuple(float(metrics[f"loss/clip_fraction_{side}"]) for side in ("high", "low"))
        assert found == wanted, (name, advantage)


def test_dual_clip_fraction() -> None:
    """Ratio e^2 above c = 3 for one token of four, and for negative advantages only."""
    for advantage, fraction in ((-1.0, 0.25), (1.0, 0.0)):
        metrics = policy_loss(
            inputs([[2.0, 1.0, 0.0, -2.0]], [advantage]), LossConfig(params={"dual_clip": 3.0})
        )[1]
        assert float(metrics["loss/dual_clip_fraction"]) == fraction


def test_a_binary_kl_of_certain_tokens() -> None:
    """From 1 to 0.5 it is log 2, from 0.5 to 1 without bound: both leave a region of 0.44."""
    params = {"trust_region": "binary_kl"}
    region = {"name": "dppo", "params": params, "clip_low": 0.44, "clip_high": 0.44}
    certain = policy_loss(inputs([[-LOG2]], [-1.0], anchor=0.0), LossConfig(**region))[1]  # type: ignore[arg-type]
    assert float(certain["loss/clip_fraction_low"]) == 1.0
    becoming = policy_loss(inputs([[LOG2]], [1.0], anchor=-LOG2), LossConfig(**region))[1]  # type: ignore[arg-type]
    assert float(becoming["loss/clip_fraction_high"]) == 1.0


@pytest.mark.parametrize("bypass", [None, BYPASS])
@pytest.mark.parametrize("reduction", list(Reduction))
def test_a_batch_of_one_token(reduction: Reduction, bypass: CorrectionConfig | None) -> None:
    loss, metrics = policy_loss(
        inputs([[0.1]], [1.0]), LossConfig(reduction=reduction), None, bypass
    )
    assert float(loss.detach()) == pytest.approx(-math.exp(0.1))
    assert float(metrics["loss/ratio_mean"]) == pytest.approx(math.exp(0.1))
    assert float(metrics["loss/approx_kl"]) == pytest.approx(-0.1)
    if bypass is not None:
        assert float(metrics["rollout_corr/kl"]) == pytest.approx(-0.1)


def test_an_empty_row_of_a_prompt_that_is_counted_nowhere() -> None:
    mask_BT = torch.tensor([[True], [False]])
    two = inputs([[0.0], [0.0]], [1.0, 1.0], mask_BT=mask_BT, denominator_mask_BT=mask_BT)
    two = replace(two, prompt_ids_B=torch.tensor([3, 9]))
    loss, _ = policy_loss(two, LossConfig(reduction="prompt_mean"))
    assert float(loss.detach()) == -1.0


def test_metrics_carry_no_gradient() -> None:
    config = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    ones_BT = torch.ones(1, 2).requires_grad_()
    metrics = policy_loss(
        inputs([[0.1, 0.2]], [1.0], ref_logprobs_BT=-ones_BT, entropy_BT=ones_BT), config
    )[1]
    assert not any(value.requires_grad for value in metrics.values())


def test_the_loss_corrects_under_the_sampler_anchor_only() -> None:
    """A weight of 5, which a correction formed here would replace by 1 (pi is mu)."""
    one = inputs([[0.0]], [1.0], weights_BT=torch.full((1, 1), 5.0))
    config = LossConfig(name="reinforce")
    assert float(policy_loss(one, config, None, CorrectionConfig())[0].detach()) == 10.0
    bypass = replace(BYPASS, weight=WeightConfig())
    assert float(policy_loss(one, config, None, bypass)[0].detach()) == 2.0


def test_metrics_are_plain_numbers() -> None:
    """They are written as JSON."""
    config = CorrectionConfig(
        weight=WeightConfig(target_ess=0.9),
        reject=[RejectRule(stat="ratio", reduce="max", high=3.0)],
    )
    p_BT = torch.tensor([[-1.0, math.nan], [-2.0, -1.5]])
    mu_BT = torch.full((2, 2), -1.0)
    found = rollout_correction(p_BT, mu_BT, torch.ones(2, 2), config)
    metrics = apply_conditional_rules(found, torch.ones(2), config).metrics
    metrics |= learner_reward(torch.ones(2), p_BT, mu_BT, torch.ones(2, 2))
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_pp", "none"])
def test_advantages_are_float32(estimator: str) -> None:
    rewards_N = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages_N, keep_N = group_advantages(
        rewards_N, torch.zeros(2), torch.ones(2), AdvantageConfig(estimator)
    )
    assert (advantages_N.dtype, keep_N.dtype) == (torch.float32, torch.bool)


def test_a_small_batch_selects_one_token() -> None:
    config = LossConfig(name="kl_cov", params={"cov_fraction": 1e-4})
    selected_BT = select_by_covariance(
        torch.tensor([[-1.0, -2.0]]), torch.ones(1), torch.ones(1, 2), config, seed=0
    )
    assert selected_BT is not None
    assert int(selected_BT.sum()) == 1


def test_a_row_newer_than_the_policy_is_not_stale() -> None:
    logprobs_BT = -torch.ones(2, 1)
    slices = breakdowns(
        logprobs_BT,
        logprobs_BT,
        torch.ones(2, 1),
        versions_BT=torch.tensor([[3], [5]]),
        policy_version=4,
    )
    assert [(one.label, one.tokens) for one in slices if one.by == "staleness"] == [
        ("0", 1),
        ("1", 1),
    ]


def test_a_fleet_of_one_format_has_no_mismatch_by_format() -> None:
    logprobs_BT = -torch.ones(2, 1)
    zeros_B = torch.zeros(2, dtype=torch.int64)
    one = batch_of(torch.ones(2, 1, dtype=torch.bool), logprobs_BT)
    int8 = list(Format).index(Format.int8)
    assert mismatch_by_format(logprobs_BT, one) == {}
    assert mismatch_by_format(logprobs_BT, replace(one, formats_B=zeros_B + int8)) == {}
    mixed = mismatch_by_format(logprobs_BT, replace(one, formats_B=torch.tensor([0, int8])))
    assert mixed["rollout_corr/int8/token_fraction"] == 0.5
    assert (
        mismatch_by_age(logprobs_BT, one, version=0) == mismatch_by_age(None, one, version=1) == {}
    )
    apart = mismatch_by_age(
        torch.tensor([[-1.0], [-0.9]]), replace(one, versions_B=torch.tensor([4, 2])), version=4
    )
    assert apart["rollout_corr/fresh/kl"] == 0
    assert apart["rollout_corr/stale/kl"] == pytest.approx(-0.1)
    assert apart["rollout_corr/stale/token_fraction"] == 0.5
    assert "rollout_corr/fresh/kl" not in mismatch_by_age(logprobs_BT, one, version=3)


def test_a_cap_counts_tokens_that_weigh_one_whatever_it_is() -> None:
    """Ratios 8, 1/2 and one without a logprob: (1 + c + 1/2)^2 = 0.8 x 3 (1 + c^2 + 1/4) at c =
    1.854.
    """
    mu_BT = torch.tensor([[0.0, 0.0, math.nan]])
    prox_BT = torch.tensor([[3 * LOG2, -LOG2, 0.0]])
    config = CorrectionConfig(weight=WeightConfig(target_ess=0.8, high=None), non_finite="one")
    metrics = rollout_correction(prox_BT, mu_BT, torch.ones(1, 3), config).metrics
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.8, abs=1e-4)
    assert metrics["rollout_corr/cap"] == pytest.approx(1.854, abs=1e-3)


def test_the_reward_of_an_overwhelming_ratio() -> None:
    """A product of e^2000 leaves only its own row."""
    p_NT = torch.tensor([[0.0], [2000.0]])
    found = learner_reward(torch.tensor([1.0, 3.0]), p_NT, torch.zeros(2, 1), torch.ones(2, 1))
    assert found["reward/learner_estimate"] == pytest.approx(3.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_that_leave_later_do_not_move_the_solved_cap(level: str) -> None:
    """What the others weigh was decided with everybody present; with a cap of 8 again it would be
    more.
    """
    d_BT = torch.tensor([[2.0, 0.0], [0.1, -0.1], [1.5, 0.2], [0.0, 0.1]])
    config = CorrectionConfig(weight=WeightConfig(level=level, high=8.0, target_ess=0.95))
    found = rollout_correction(d_BT, torch.zeros_like(d_BT), torch.ones_like(d_BT), config)
    assert found.cap == found.metrics["rollout_corr/cap"] < 3.0
    fewer = keep_rows(found, torch.tensor([True, False, True, True]), config)
    assert torch.equal(fewer.weights_BT[[0, 2, 3]], found.weights_BT[[0, 2, 3]])
    assert fewer.metrics["rollout_corr/rollout_is_max"] == pytest.approx(found.cap)


ZEROS_BT = torch.zeros(4, 3)
MASK_BT = torch.ones(4, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prox", "mu", "mask", "words"),
    [
        (slice(4), slice(4), slice(2), r"proximal logprobs are \[4, 3\] and the mask is \[2, 3\]"),
        (slice(4), slice(1), slice(4), r"sampler logprobs are \[1, 3\] and the mask is \[4, 3\]"),
        (slice(1), slice(4), slice(4), r"proximal logprobs are \[1, 3\]"),
        (None, slice(1), slice(4), r"sampler logprobs are \[1, 3\]"),
    ],
)
def test_every_position_needs_its_own_numbers(
    prox: slice | None, mu: slice, mask: slice, words: str
) -> None:
    config = BYPASS if prox is None else CorrectionConfig()
    prox_BT = None if prox is None else ZEROS_BT[prox]
    with pytest.raises(ValueError, match=words):
        rollout_correction(prox_BT, ZEROS_BT[mu], MASK_BT[mask], config)


@pytest.mark.parametrize("shape", [(3,), (), (4, 1)])
def test_a_sampler_logprob_per_row_or_position_is_no_matrix(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="one logprob and one mask entry"):
        rollout_correction(ZEROS_BT, torch.zeros(shape), MASK_BT, CorrectionConfig())


def test_an_unknown_word_is_no_other_word() -> None:
    config = CorrectionConfig(non_finite="ignore")  # type: ignore[arg-type]
    for prox_BT, given in ((ZEROS_BT, config), (None, replace(config, anchor="sampler"))):
        with pytest.raises(ValueError, match=r"correction\.non_finite is ignore"):
            rollout_correction(prox_BT, ZEROS_BT, MASK_BT, given)
