"""rollout_correction against the oracle: every knob, one at a time and several together.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from correction_oracle import correct
from loss_cases import BYPASS
from matrices import Corrected, batch_of, rollout_correction

from megatron_rl.batch import Share
from megatron_rl.config.schema import AdvantageConfig, CorrectionConfig, RejectRule, WeightConfig
from megatron_rl.rollout_correction import correction


def example(
    seed: int = 0, rows: int = 7, columns: int = 9, spread: float = 0.4
) -> tuple[torch.Tensor, ...]:
    """Ragged rows, one of them empty, one with a hole as tool output leaves it."""
    generator = torch.Generator().manual_seed(seed)
    mu_BT = -torch.rand(rows, columns, generator=generator) * 3
    prox_BT = mu_BT + spread * torch.randn(rows, columns, generator=generator)
    lengths_B = torch.randint(1, columns + 1, (rows,), generator=generator)
    lengths_B[0] = 0
    lengths_B[-1] = columns
    mask_BT = torch.arange(columns)[None] < lengths_B[:, None]
    mask_BT[-1, columns // 2] = False
    return prox_BT, mu_BT, mask_BT


WEIGHTS = {
    "none": WeightConfig(level="none"),
    "tis": WeightConfig(high=1.3),
    "unbounded": WeightConfig(high=None),
    "two-sided": WeightConfig(low=0.8, high=1.25),
    "one-sided low": WeightConfig(low=0.9, high=None),
    "zero outside": WeightConfig(outside="zero", low=0.7, high=1.5),
    "zero above": WeightConfig(outside="zero", high=1.2),
    "zero below": WeightConfig(outside="zero", low=0.9, high=None),
    "normalized": WeightConfig(high=1.5, normalize=True),
    "product": WeightConfig(level="sequence", high=5.0),
    "geometric": WeightConfig(level="sequence", aggregate="geometric", low=0.9, high=1.1),
    "free geometric": WeightConfig(level="sequence", aggregate="geometric", high=None),
    "product, zero outside": WeightConfig(level="sequence", outside="zero", low=0.5, high=2.0),
    "product normalized": WeightConfig(level="sequence", high=3.0, normalize=True),
}
RULES = [
    RejectRule(level=level, stat=stat, reduce=reduce, **bounds)
    for stat, bounds in {
        "ratio": {"low": 0.8, "high": 1.15},
        "k1": {"low": -0.1, "high": 0.2},
        "k2": {"high": 0.1},
        "k3": {"high": 0.08},
        "m2": {"low": 0.01, "high": 0.3},
        "abs": {"high": 1.4},
    }.items()
    for level, reduce in [
        ("token", None),
        *itertools.product(["sequence"], ["sum", "mean", "max", "min"]),
    ]
]


def assert_equal(found: Corrected, expected: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    weights, kept, denominators = expected
    np.testing.assert_array_equal(found.mask_BT.numpy(), kept)
    np.testing.assert_array_equal(found.denominator_mask_BT.numpy(), denominators)
    np.testing.assert_allclose(found.weights_BT.numpy(), weights, rtol=1e-6, atol=1e-6)


def assert_rejected(found: Corrected, mask_BT: torch.Tensor) -> None:
    assert torch.equal(found.rejected_B, mask_BT.any(dim=1) & ~found.mask_BT.any(dim=1))


def assert_matches(
    config: CorrectionConfig,
    prox_BT: torch.Tensor,
    mu_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    turns_BT: torch.Tensor | None = None,
) -> None:
    found = rollout_correction(prox_BT, mu_BT, mask_BT, config, turns_BT)
    assert_equal(found, correct(prox_BT, mu_BT, mask_BT, config, turns=turns_BT))
    assert found.weights_BT.dtype == torch.float32
    assert not found.weights_BT.requires_grad
    assert not found.weights_BT[~found.mask_BT].any()
    assert_rejected(found, mask_BT)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str) -> None:
    for seed in range(5):
        assert_matches(CorrectionConfig(weight=WEIGHTS[name]), *example(seed))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.level}-{rule.stat}-{rule.reduce}")
def test_rules_two_sided_and_one_sided(rule: RejectRule) -> None:
    bounds = {"low": rule.low, "high": rule.high}
    kept = set()
    for only, seed in itertools.product([(), ("low",), ("high",)], range(3)):
        left = dict.fromkeys(only)
        if all(value is None for value in (bounds | left).values()):
            continue
        one = RejectRule(**{**vars(rule), **left})
        batch = example(seed)
        assert_matches(CorrectionConfig(reject=[one], renormalize=seed % 2 == 0), *batch)
        kept.add(int(rollout_correction(*batch, CorrectionConfig(reject=[one])).mask_BT.sum()))
    assert len(kept) > 1  # the rule rejects something somewhere


@pytest.mark.parametrize("stat", ["m2", "k2", "k3", "abs", "ratio"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_budget(stat: str, level: str) -> None:
    reduce = "mean" if level == "sequence" else None
    floor = 1.0 if stat in ("abs", "ratio") else 0.0
    for budget in (floor + 0.02, floor + 0.1, floor + 10.0):
        rule = RejectRule(level=level, stat=stat, reduce=reduce, budget=budget)
        assert_matches(CorrectionConfig(reject=[rule]), *example(3))


def test_budget_is_met_and_tight() -> None:
    prox_BT, mu_BT, mask_BT = example(1, rows=40, columns=30)
    config = CorrectionConfig(reject=[RejectRule(level="token", stat="m2", budget=0.04)])
    kept_BT = rollout_correction(prox_BT, mu_BT, mask_BT, config).mask_BT
    m2_BT = (prox_BT - mu_BT).square()
    assert m2_BT[kept_BT].mean() <= 0.04
    next_one = m2_BT[mask_BT & ~kept_BT].min()
    assert (m2_BT[kept_BT].sum() + next_one) / (kept_BT.sum() + 1) > 0.04


def test_rules_are_anded_and_see_the_original_mask() -> None:
    rules = [
        RejectRule(level="token", stat="ratio", low=0.7, high=1.4),
        RejectRule(level="sequence", stat="ratio", reduce="max", high=1.6),
        RejectRule(level="sequence", stat="k3", reduce="mean", high=0.2),
    ]
    for order in itertools.permutations(rules):
        assert_matches(CorrectionConfig(reject=list(order)), *example(2))


def test_conditional_rules() -> None:
    prox_BT, mu_BT, mask_BT = example(4)
    advantages_B = torch.tensor([1.0, -1.0, 0.0, -0.5, 2.0, -3.0, -1.0])
    for rule in (
        RejectRule(stat="k1", reduce="mean", high=0.05, when="negative_advantage"),
        RejectRule(level="token", stat="k1", high=0.05, when="negative_advantage"),
    ):
        for renormalize, weight in itertools.product(
            [True, False], [WEIGHTS["tis"], WEIGHTS["normalized"]]
        ):
            config = CorrectionConfig(weight=weight, reject=[rule], renormalize=renormalize)
            before = rollout_correction(prox_BT, mu_BT, mask_BT, config)
            assert torch.equal(before.mask_BT, mask_BT)
            after = rollout_correction(
                prox_BT,
                mu_BT,
                mask_BT,
                config,
                judge=lambda _: (advantages_B, advantages_B.isfinite()),
            )
            assert_equal(after, correct(prox_BT, mu_BT, mask_BT, config, advantages_B))
            assert int(after.mask_BT.sum()) < int(mask_BT.sum())
            assert torch.equal(after.rejected_B, before.rejected_B)  # they move no baseline


@pytest.mark.parametrize("anchor", ["prox", "sampler"])
def test_denominators_are_no_view_of_the_mask(anchor: str) -> None:
    prox_BT, mu_BT, mask_BT = example()
    found = rollout_correction(
        None if anchor == "sampler" else prox_BT, mu_BT, mask_BT, CorrectionConfig(anchor)
    )
    denominators = found.denominator_mask_BT.clone()
    found.mask_BT.fill_(False)
    assert torch.equal(found.denominator_mask_BT, denominators)
    assert mask_BT.any()


def test_a_row_without_an_advantage_is_rejected() -> None:
    prox_BT, mu_BT, mask_BT = example(5)
    keep_B = torch.tensor([True, False, True, True, False, True, True])
    for renormalize, name in itertools.product((True, False), ("normalized", "product normalized")):
        config = CorrectionConfig(weight=WEIGHTS[name], renormalize=renormalize)
        found = rollout_correction(
            prox_BT, mu_BT, mask_BT, config, judge=lambda _: (torch.ones(7), keep_B)
        )
        only_BT = mask_BT & keep_B[:, None]
        weights, kept, _ = correct(prox_BT, mu_BT, only_BT, config)
        assert_equal(found, (weights, kept, kept if renormalize else mask_BT.numpy()))
        assert found.metrics["rollout_corr/rollout_is_max"] == pytest.approx(weights.max())


class TestTargetEss:
    def solved(self, level: str, target: float, high: float | None) -> tuple[float, float]:
        config = CorrectionConfig(weight=WeightConfig(level=level, target_ess=target, high=high))
        spread = 0.7 if level == "token" else 0.15  # a product of 40 ratios spreads more
        metrics = rollout_correction(
            *example(6, rows=60, columns=40, spread=spread), config
        ).metrics
        return metrics["rollout_corr/cap"], metrics["rollout_corr/rollout_is_eff_sample_size"]

    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_is_met_and_the_largest(self, level: str) -> None:
        cap, ess = self.solved(level, 0.85, 50.0)
        assert 1.0 < cap < 50.0
        assert ess == pytest.approx(0.85, abs=1e-3)
        assert ess >= 0.85 - 1e-6

    @pytest.mark.parametrize("level", ["token", "sequence"])
    def test_ceiling_and_floor(self, level: str) -> None:
        assert self.solved(level, 0.01, 1.5)[0] == 1.5
        assert self.solved(level, 1.0, 9.0)[0] == pytest.approx(1.0)

    def test_null_ceiling_is_the_largest_ratio(self) -> None:
        prox_BT, mu_BT, mask_BT = example(6)
        config = CorrectionConfig(weight=WeightConfig(target_ess=0.01, high=None))
        found = rollout_correction(prox_BT, mu_BT, mask_BT, config)
        assert found.metrics["rollout_corr/cap"] == pytest.approx(
            float((prox_BT - mu_BT)[mask_BT].max().exp())
        )

    def test_only_survivors_count(self) -> None:
        prox_BT, mu_BT, mask_BT = example(7, rows=60, columns=40, spread=0.7)
        rule = RejectRule(level="token", stat="ratio", high=2.0)
        config = CorrectionConfig(weight=WeightConfig(target_ess=0.9, high=50.0), reject=[rule])
        both = rollout_correction(prox_BT, mu_BT, mask_BT, config)
        kept_only = rollout_correction(
            prox_BT, mu_BT, both.mask_BT, CorrectionConfig(weight=config.weight)
        )
        assert both.metrics["rollout_corr/cap"] == pytest.approx(
            kept_only.metrics["rollout_corr/cap"], rel=1e-5
        )


@pytest.mark.parametrize("policy", ["drop", "one", "zero", "reject"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["sampler", "learner", "both"])
def test_non_finite(policy: str, value: float, side: str) -> None:
    prox_BT, mu_BT, mask_BT = example(8)
    for row, column in ((6, 0), (6, 3), (2, 0)):
        assert mask_BT[row, column]
        if side in ("sampler", "both"):
            mu_BT[row, column] = value
        if side in ("learner", "both"):
            prox_BT[row, column] = value
    rule = RejectRule(stat="ratio", reduce="mean", low=0.5, high=2.0)
    for name in ("tis", "none", "product", "normalized", "free geometric"):
        for rules in ([], [rule]):
            config = CorrectionConfig(weight=WEIGHTS[name], non_finite=policy, reject=rules)
            assert_matches(config, prox_BT, mu_BT, mask_BT)
    metrics = rollout_correction(
        prox_BT, mu_BT, mask_BT, CorrectionConfig(non_finite=policy)
    ).metrics
    assert metrics["rollout_corr/non_finite_sampler"] == (0 if side == "learner" else 3)
    assert metrics["rollout_corr/non_finite_learner"] == (0 if side == "sampler" else 3)
    assert all(math.isfinite(found) for found in metrics.values())


def test_non_finite_raise() -> None:
    prox_BT, mu_BT, mask_BT = example(9)
    config = CorrectionConfig(non_finite="raise")
    rollout_correction(prox_BT, mu_BT, mask_BT, config)
    prox_BT[6, 1] = math.nan  # non-finite learner logprobs are dropped under any policy
    rollout_correction(prox_BT, mu_BT, mask_BT, config)
    mu_BT[6, 2] = math.nan
    with pytest.raises(ValueError, match=r"correction\.non_finite: raise"):
        rollout_correction(prox_BT, mu_BT, mask_BT, config)


def test_anchor_sampler_before_the_loss() -> None:
    prox_BT, mu_BT, mask_BT = example(10)
    mu_BT[6, 0] = math.nan
    for policy in ("drop", "one", "zero", "reject"):
        config = replace(BYPASS, non_finite=policy)
        found = rollout_correction(None, mu_BT, mask_BT, config)
        assert_equal(found, correct(prox_BT, mu_BT, mask_BT, config))
        assert_rejected(found, mask_BT)
        assert found.metrics == {"rollout_corr/non_finite_sampler": 1.0}


def test_baseline_keep() -> None:
    prox_BT, mu_BT, mask_BT = example(11)
    share = Share.alone(batch_of(mask_BT, mu_BT))
    rule = RejectRule(stat="ratio", reduce="max", high=1.5)
    (found, _, with_it_B), (_, _, without_B) = (
        correction.correct(
            share,
            prox_BT.flatten(),
            CorrectionConfig(reject=[rule], rebaseline=rebaseline),
            AdvantageConfig(),
        )
        for rebaseline in (True, False)
    )
    assert found.rejected_B.any()
    assert not found.rejected_B.all()
    assert torch.equal(with_it_B, mask_BT.any(dim=1) & ~found.rejected_B)
    assert without_B.all()
    assert not found.rejected_B[0]  # an empty response is not a rejected one
    assert not with_it_B[0]  # but says nothing about its siblings either


def test_bfloat16_logprobs_are_subtracted_in_float32() -> None:
    prox_BT, mu_BT, mask_BT = example(12)
    prox_BT = prox_BT.bfloat16()
    mu_BT = mu_BT.bfloat16()
    assert_matches(CorrectionConfig(weight=WEIGHTS["unbounded"]), prox_BT, mu_BT, mask_BT)
