"""Traps that corrections elsewhere have fallen into, and edges where a comparison or a default
decides: values by hand, beside the tests against the oracles.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from loss_cases import BYPASS, LOG2, corrected, inputs_for
from matrices import LossInputs, batch_of, count_totals, policy_loss, rollout_correction

from megatron_rl.batch import Share
from megatron_rl.config.correction_rules import check_correction, check_objective
from megatron_rl.config.schema import (
    CorrectionConfig,
    Format,
    LossConfig,
    LossName,
    Reduce,
    RejectRule,
    WeightConfig,
)
from megatron_rl.loss.covariance import select_by_covariance
from megatron_rl.loss.table import LOSSES
from megatron_rl.rollout_correction.breakdown import mismatch_by_age, mismatch_by_format

RATIO_LOSSES = [name for name in LossName if LOSSES[name].ratio]


@pytest.mark.parametrize(
    ("stat", "reduces", "bounds", "kept"),
    [
        (
            "ratio",
            (None, "sum", "mean", "max", "min"),
            {"high": 1.5},
            [False, True],
        ),
        (
            "k1",
            (None, "sum", "mean", "max", "min"),
            {"low": -0.6, "high": 1.0},
            [False, True],
        ),
        ("k1", ("mean",), {"low": 0.0}, [False, True]),  # a bound of zero is a bound
        ("k1", ("mean",), {"high": 0.0}, [True, False]),
        # 2 - 1 - log 2 = 0.31 and 0.5 - 1 + log 2 = 0.19
        ("k3", ("mean",), {"high": 0.25}, [False, True]),
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
    pi_BT = torch.tensor([[0.9] * 9 + [0.1]]).log()
    other_BT = torch.full((1, 10), -LOG2)
    found = rollout_correction(pi_BT, pi_BT, torch.ones(1, 10), CorrectionConfig())
    inputs = inputs_for(found, [1.0], ref_logprobs_BT=other_BT)
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    metrics = policy_loss(inputs, LossConfig(kl_coef=1.0, kl_estimator=estimator))[1]
    assert float(metrics["loss/kl"]) == pytest.approx(forward, abs=1e-5)
    moved = policy_loss(replace(inputs, logprobs_BT=other_BT), LossConfig())[1]
    # from the anchor to the policy
    assert float(moved["loss/approx_kl"]) == pytest.approx(forward, abs=1e-5)


def test_absurd_logprobs_cannot_cancel_into_a_weight() -> None:
    """Finite differences whose row sum is inf - inf."""
    d = [[3e38, 3e38, -3e38, -3e38] * 32]
    for level in ("token", "sequence"):
        found = corrected(d, weight=WeightConfig(level=level))
        assert not found.mask_BT.any()
        assert found.metrics["rollout_corr/non_finite_learner"] == 128
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

    def judge(counted_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert counted_B.tolist() == [False] * rows
        return -torch.ones(rows), counted_B

    for weight in (
        WeightConfig(normalize=True),
        WeightConfig(level="sequence", normalize=True),
        WeightConfig(level="sequence", aggregate="geometric"),
        WeightConfig(target_ess=0.9),
    ):
        config = CorrectionConfig(weight=weight, reject=rules)
        found = rollout_correction(nothing_BT, nothing_BT, nothing_BT, config, judge=judge)
        assert found.rejected_B.tolist() == [False] * rows
        assert found.weights_BT.tolist() == nothing_BT.tolist()
        assert {key for key, value in found.metrics.items() if value != 0.0} <= {"rollout_corr/cap"}
    assert found.metrics["rollout_corr/cap"] == 2.0
    inputs = inputs_for(found, [1.0] * rows)
    for totals in (None, count_totals(found.denominator_mask_BT, inputs.prompt_ids_B, horizon=1)):
        loss, metrics = policy_loss(inputs, LossConfig(), totals, BYPASS)
        assert all(math.isfinite(float(value)) for value in (loss.detach(), *metrics.values()))
    for name in ("clip_cov", "kl_cov"):
        selected_N = select_by_covariance(
            Share.alone(batch_of(nothing_BT, nothing_BT)),
            nothing_BT.flatten(),
            torch.ones(rows),
            found.flat.mask_N,
            LossConfig(name=name),
            seed=0,
        )
        assert selected_N is not None and not selected_N.any()


def test_loss_metrics_count_no_padding() -> None:
    """Both tokens at ratio e, above the clip; the padding, at ratio 1 and on the open bound, is not
    counted.
    """
    found = corrected([[0.0] * 4], [[1, 1, 0, 0]])
    inputs = inputs_for(
        found,
        [1.0],
        logprobs_BT=torch.full((1, 4), -1.0),
    )
    metrics = policy_loss(inputs, LossConfig(name="rollout_is", clip_high=0.0))[1]
    assert float(metrics["loss/clip_fraction_high"]) == 1.0
    assert float(metrics["loss/ratio_mean"]) == pytest.approx(math.e)
    assert float(metrics["loss/approx_kl"]) == pytest.approx(-1.0)
    selected_BT = torch.tensor([[True, False, True, True]])
    metrics = policy_loss(replace(inputs, selected_BT=selected_BT), LossConfig(name="kl_cov"))[1]
    assert float(metrics["loss/selected_fraction"]) == 0.5


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_no_weight_on_top_of_a_ratio_that_holds_it(name: LossName, level: str) -> None:
    config = replace(BYPASS, weight=WeightConfig(level=level))
    found, *_ = check_objective(config, LossConfig(name=name))
    assert found.startswith(f"correction.weight.level is {level}")
    assert check_objective(config, LossConfig(name="reinforce")) == []


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
    (refusal,) = check_correction(
        CorrectionConfig(weight=WeightConfig(outside="zero", target_ess=0.9))
    )
    assert "monotone" in refusal


def test_products_shrink_with_length() -> None:
    """At equal mismatch per token the product keeps its effective sample size at 16 tokens, and
    loses it at 1,024.
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
    shift: list[list[float]], advantages: list[float], anchor: float = -2.0, **changes: torch.Tensor
) -> LossInputs:
    """A policy that moved by `shift` from the anchor."""
    shift_BT = torch.tensor(shift)
    anchor_BT = torch.full_like(shift_BT, anchor)
    found = rollout_correction(anchor_BT, anchor_BT, torch.ones_like(anchor_BT), CorrectionConfig())
    moved_BT = (anchor_BT + shift_BT).requires_grad_()
    return inputs_for(found, advantages, logprobs_BT=moved_BT, **changes)


UP_AND_DOWN = [1.0] * 3 + [-1.0] * 2 + [0.0] * 3  # above the band, below it, inside
DOUBLED = [LOG2 * size for size in UP_AND_DOWN]  # a probability of 0.135 doubles or halves
NARROW = {"clip_low": 0.05, "clip_high": 0.05}


@pytest.mark.parametrize(
    ("names", "keys", "shift", "by_advantage"),
    [
        # bounds that only stop what gains, bounds on the ratio itself, and a trust region
        (
            ("ppo", "gmpo"),
            {},
            UP_AND_DOWN,
            {
                1.0: (0.375, 0.0),
                -1.0: (0.0, 0.25),
                0.0: (0.0, 0.0),
            },
        ),
        (
            ("cispo", "rollout_is"),
            {},
            UP_AND_DOWN,
            {1.0: (0.375, 0.25), -1.0: (0.375, 0.25)},
        ),
        (
            ("dppo",),
            NARROW,
            DOUBLED,
            {1.0: (0.375, 0.0), -1.0: (0.0, 0.25)},
        ),
        # bounds that a ratio of one touches: it is clipped from outside the band, or from an open
        # band's edge on
        (
            ("cispo", "ppo"),
            {"clip_low": 0.0, "clip_high": 0.0},
            [0.0],
            {1.0: (0.0, 0.0)},
        ),
        (
            ("rollout_is",),
            {"clip_low": 0.0, "clip_high": 0.5},
            [0.0],
            {1.0: (0.0, 1.0)},
        ),
        (
            ("rollout_is",),
            {"clip_low": 0.5, "clip_high": 0.0},
            [0.0],
            {1.0: (1.0, 0.0)},
        ),
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


@pytest.mark.parametrize(
    ("anchor", "policy", "side"),
    [
        (0.9, 0.5, None),
        (0.5, 0.9, "high"),
        (1.0, 0.5, "low"),
        (0.5, 1.0, "high"),
    ],
)
def test_a_binary_kl_is_from_the_anchor_to_the_policy(
    anchor: float, policy: float, side: str | None
) -> None:
    """0.9 to 0.5 is 0.368 nats and 0.511 the other way; 1 to 0.5 is log 2, 0.5 to 1 without bound:
    a region of 0.44 lets in the first alone.
    """
    advantage = math.copysign(1.0, policy - anchor)
    token = inputs(
        [[math.log(policy / anchor)]],
        [advantage],
        math.log(anchor),
    )
    config = LossConfig(
        name="dppo", params={"trust_region": "binary_kl"}, clip_low=0.44, clip_high=0.44
    )
    metrics = policy_loss(token, config)[1]
    for one in ("low", "high"):
        assert float(metrics[f"loss/clip_fraction_{one}"]) == (one == side)


def test_metrics_carry_no_gradient() -> None:
    config = LossConfig(kl_coef=0.1, entropy_coef=0.1)
    ones_BT = torch.ones(1, 2).requires_grad_()
    metrics = policy_loss(
        inputs(
            [[0.1, 0.2]],
            [1.0],
            ref_logprobs_BT=-ones_BT,
            entropy_BT=ones_BT,
        ),
        config,
    )[1]
    assert not any(value.requires_grad for value in metrics.values())


def test_the_loss_corrects_under_the_sampler_anchor_only() -> None:
    """A weight of 5, which a correction formed here would replace by 1 (pi is mu)."""
    one = inputs(
        [[0.0]],
        [1.0],
        weights_BT=torch.full((1, 1), 5.0),
    )
    config = LossConfig(name="reinforce")
    assert float(policy_loss(one, config, None, CorrectionConfig())[0].detach()) == 10.0
    bypass = replace(BYPASS, weight=WeightConfig())
    assert float(policy_loss(one, config, None, bypass)[0].detach()) == 2.0


def test_a_fleet_of_one_format_has_no_mismatch_by_format() -> None:
    logprobs_N = -torch.ones(2)
    int8 = list(Format).index(Format.int8)

    def share(**columns: torch.Tensor) -> Share:
        return Share.alone(batch_of(torch.ones(2, 1), logprobs_N, **columns))

    one = share()
    assert mismatch_by_format(logprobs_N, one) == {}
    assert mismatch_by_format(logprobs_N, share(formats_B=torch.tensor([int8, int8]))) == {}
    mixed = mismatch_by_format(logprobs_N, share(formats_B=torch.tensor([0, int8])))
    assert mixed["rollout_corr/int8/token_fraction"] == 0.5
    assert mismatch_by_age(logprobs_N, one, version=0) == {}
    apart = mismatch_by_age(
        torch.tensor([-1.0, -0.9]), share(versions_B=torch.tensor([4, 2])), version=4
    )
    assert apart["rollout_corr/fresh/kl"] == 0
    assert apart["rollout_corr/stale/kl"] == pytest.approx(-0.1)
    assert apart["rollout_corr/stale/token_fraction"] == 0.5
    assert "rollout_corr/fresh/kl" not in mismatch_by_age(logprobs_N, one, version=3)


def test_any_cap_counts_tokens_of_weight_one() -> None:
    """Ratios 8, 1/2 and one without a logprob: (1 + c + 1/2)^2 = 0.8 x 3 (1 + c^2 + 1/4) at c =
    1.854.
    """
    mu_BT = torch.tensor([[0.0, 0.0, math.nan]])
    prox_BT = torch.tensor([[3 * LOG2, -LOG2, 0.0]])
    config = CorrectionConfig(weight=WeightConfig(target_ess=0.8, high=None), non_finite="one")
    metrics = rollout_correction(prox_BT, mu_BT, torch.ones(1, 3), config).metrics
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(0.8, abs=1e-4)
    assert metrics["rollout_corr/cap"] == pytest.approx(1.854, abs=1e-3)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_rows_that_leave_later_do_not_move_the_solved_cap(level: str) -> None:
    """The cap was solved with all rows; with a cap of 8 the remaining weights would be larger."""
    d_BT = torch.tensor([[2.0, 0.0], [0.1, -0.1], [1.5, 0.2], [0.0, 0.1]])
    config = CorrectionConfig(weight=WeightConfig(level=level, high=8.0, target_ess=0.95))
    given = (d_BT, torch.zeros_like(d_BT), torch.ones_like(d_BT), config)
    found = rollout_correction(*given)
    cap = found.metrics["rollout_corr/cap"]
    assert cap < 3.0
    keep_B = torch.tensor([True, False, True, True])
    fewer = rollout_correction(*given, judge=lambda _: (torch.ones(4), keep_B))
    assert torch.equal(fewer.weights_BT[[0, 2, 3]], found.weights_BT[[0, 2, 3]])
    assert fewer.metrics["rollout_corr/rollout_is_max"] == pytest.approx(cap)
