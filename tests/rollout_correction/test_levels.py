"""Weights and rules by turn and by prefix, statistics of probabilities: the oracle's numbers, and
what must hold.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import correction_oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from loss_cases import inputs_of, rows_of
from matrices import count_totals, policy_loss, rollout_correction
from test_properties import (
    EXAMPLES,
    GARBAGE,
    Batch,
    assert_same,
    batches,
    configs,
    far_from_bounds,
)
from test_rollout_correction import assert_matches, example

from megatron_rl.advantage import group_advantages
from megatron_rl.config.schema import (
    AdvantageConfig,
    Aggregate,
    CorrectionConfig,
    LossConfig,
    NonFinite,
    Outside,
    Reduce,
    RejectRule,
    WeightConfig,
)
from megatron_rl.segments import Segments

FREE = {"low": None, "high": None}
GROUPED = [
    WeightConfig(level=level, aggregate=how, high=None)
    for level in ("turn", "prefix")
    for how in ("product", "geometric")
]
STATS = {
    "ratio": {"low": 0.8, "high": 1.15},
    "k3": {"high": 0.08},
    "tv": {"high": 0.05},
    "binary_kl": {"high": 0.02},
    "binary_kl_max": {"high": 0.02},
}


def turns_of(mask_BT: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Turns of a few tokens; tool output, which nothing is trained on, is in none."""
    generator = torch.Generator().manual_seed(seed)
    turns_BT = (torch.rand(mask_BT.shape, generator=generator) < 0.3).long().cumsum(dim=1)
    return turns_BT.masked_fill(
        ~mask_BT & (torch.rand(mask_BT.shape, generator=generator) < 0.7), -1
    )


def segments(turns_BT: torch.Tensor) -> Segments:
    rows, columns = turns_BT.shape
    return Segments.turns(
        turns_BT.flatten(), Segments.rows(torch.full((rows,), columns), rows * columns)
    )


def name(one: WeightConfig | RejectRule) -> str:
    return "-".join(str(value) for value in list(vars(one).values())[:3])


@pytest.mark.parametrize("weight", GROUPED, ids=name)
@pytest.mark.parametrize(
    "bounds",
    [
        FREE,
        {"high": 1.2},
        {"low": 0.8, "high": 1.25, "outside": "zero"},
        {"normalize": True},
    ],
)
def test_weights(weight: WeightConfig, bounds: dict) -> None:
    for seed in range(4):
        batch = example(seed)
        assert_matches(
            CorrectionConfig(weight=replace(weight, **bounds)), *batch, turns_of(batch[2], seed)
        )


@pytest.mark.parametrize("stat", STATS)
@pytest.mark.parametrize("level", ["token", "sequence", "turn", "prefix"])
def test_rules(level: str, stat: str) -> None:
    reduces = [None] if level == "token" else list(Reduce)
    kept = set()
    for reduce, seed in itertools.product(reduces, range(3)):
        rule = RejectRule(level=level, stat=stat, reduce=reduce, **STATS[stat])
        prox_BT, *others = example(seed)
        batch = (prox_BT.clamp(max=-0.01), *others)  # a probability
        turns_BT = turns_of(batch[2], seed)
        assert_matches(CorrectionConfig(reject=[rule]), *batch, turns_BT)
        kept.add(
            int(
                rollout_correction(
                    *batch,
                    CorrectionConfig(reject=[rule]),
                    turns_BT,
                ).mask_BT.sum()
            )
        )
    assert len(kept) > 1


@pytest.mark.parametrize("level", ["turn", "prefix"])
def test_budgets(level: str) -> None:
    batch = example(3)
    for budget in (0.02, 0.1):
        rule = RejectRule(level=level, stat="m2", reduce="mean", budget=budget)
        assert_matches(CorrectionConfig(reject=[rule]), *batch, turns_of(batch[2]))


@pytest.mark.parametrize("aggregate", list(Aggregate))
def test_segments(aggregate: Aggregate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three trained tokens here; text of tools lies in a segment without being counted."""
    monkeypatch.setattr("megatron_rl.rollout_correction.ratio.SEGMENT_TOKENS", 3)
    monkeypatch.setattr(correction_oracle, "SEGMENT_TOKENS", 3)
    weight = WeightConfig(level="segment", aggregate=aggregate, high=1.3)
    rejected = set()
    for seed in range(4):
        batch = example(seed)
        assert_matches(CorrectionConfig(weight=replace(weight, normalize=True)), *batch)
        for reduce in Reduce:
            rule = RejectRule(level="segment", stat="ratio", reduce=reduce, low=0.9, high=1.2)
            config = CorrectionConfig(weight=weight, reject=[rule])
            assert_matches(config, *batch)
            kept_BT = rollout_correction(*batch, config).mask_BT
            rejected.add(int(kept_BT.sum()))
    assert len(rejected) > 2


def test_segments_of_negative_rows_that_the_learner_finds_less_likely() -> None:
    d_BT = torch.full((2, 200), 0.1)
    d_BT[:, 64:128] = -0.1
    rule = RejectRule(
        level="segment", stat="ratio", reduce="mean", low=1.0, when="negative_advantage"
    )
    found = rollout_correction(
        d_BT,
        0 * d_BT,
        torch.ones(2, 200),
        CorrectionConfig(reject=[rule]),
        judge=lambda counted_B: (torch.tensor([1.0, -1.0]), counted_B),
    )
    assert found.mask_BT[0].all()
    assert torch.equal(found.mask_BT[1], d_BT[1] > 0)


def test_sixty_turns_have_sixty_weights() -> None:
    """The weight of a row is near 0 where those of its turns and tokens are near 1."""
    d_BT = torch.full((1, 3000), -9.4e-4)
    turns_BT = (torch.arange(3000) // 50)[None]
    for level, tokens in (("token", 1), ("turn", 50), ("sequence", 3000)):
        config = CorrectionConfig(weight=WeightConfig(level=level))
        found = rollout_correction(d_BT, 0 * d_BT, torch.ones(1, 3000), config, turns_BT)
        weight = math.exp(-9.4e-4 * tokens)
        torch.testing.assert_close(found.weights_BT, torch.full_like(d_BT, weight))


def by(level: str, config: CorrectionConfig) -> CorrectionConfig:
    """Return the correction with every rule at one level."""
    product = config.weight.aggregate if level in ("sequence", "turn") else "product"
    weight = replace(config.weight, level=level, aggregate=Aggregate(product))
    rules = [
        replace(rule, level=level, reduce=None if level == "token" else "mean")
        for rule in config.reject
    ]
    return replace(config, weight=weight, reject=rules)


@EXAMPLES
@given(batches(faults=True), configs())
def test_one_turn_is_the_sequence(batch: Batch, config: CorrectionConfig) -> None:
    row = by("sequence", config)
    turn = by("turn", config)
    if far_from_bounds(batch, row):
        assert_same(
            rollout_correction(*batch, row),
            rollout_correction(*batch, turn, torch.full(batch[2].shape, 7)),
        )
        assert_same(rollout_correction(*batch, row), rollout_correction(*batch, turn), exact=True)


@EXAMPLES
@given(batches(faults=True), configs())
def test_one_token_is_its_turn_its_prefix_and_its_row(
    batch: Batch, config: CorrectionConfig
) -> None:
    one: Batch = tuple(values[:, :1] for values in batch)  # type: ignore[assignment]
    # a mean weight of tokens counts them, that of rows does not
    if config.non_finite == NonFinite.zero:
        config = replace(config, non_finite=NonFinite.drop)
    if far_from_bounds(one, by("token", config)):
        token = rollout_correction(*one, by("token", config))
        for level in ("sequence", "turn", "prefix"):
            assert_same(
                token,
                rollout_correction(
                    *one, by(level, config), torch.zeros(one[2].shape, dtype=torch.int64)
                ),
            )


@EXAMPLES
@given(batches(), st.sampled_from(GROUPED), st.sampled_from(list(Outside)))
def test_on_policy_every_weight_is_one(
    batch: Batch, weight: WeightConfig, outside: Outside
) -> None:
    _, mu_BT, mask_BT = batch
    config = CorrectionConfig(weight=replace(weight, outside=outside, low=0.9, high=1.1))
    found = rollout_correction(mu_BT, mu_BT, mask_BT, config, turns_of(mask_BT))
    assert torch.equal(found.weights_BT, mask_BT.float())
    assert found.metrics["rollout_corr/rollout_is_eff_sample_size"] == float(mask_BT.any())


@EXAMPLES
@given(
    batches(faults=True), configs(whole_batch=False), st.integers(0, 7), st.sampled_from(GARBAGE)
)
def test_splits_and_padding(
    batch: Batch, config: CorrectionConfig, cut: int, garbage: float
) -> None:
    turns_BT = turns_of(batch[2])
    whole = rollout_correction(*batch, config, turns_BT)
    for rows in (slice(cut), slice(cut, None)):
        part = rollout_correction(*(one[rows] for one in batch), config, turns_BT[rows])
        assert torch.equal(part.weights_BT, whole.weights_BT[rows])
        assert torch.equal(part.mask_BT, whole.mask_BT[rows])
    dirty = [values.masked_fill(~batch[2], garbage) for values in batch[:2]]
    other = rollout_correction(
        *dirty,
        batch[2],
        config,
        turns_BT.masked_fill(~batch[2], 10**6 - 1),
    )  # type: ignore[call-arg]
    torch.testing.assert_close(other.weights_BT, whole.weights_BT, rtol=1e-6, atol=1e-7)
    assert torch.equal(other.mask_BT, whole.mask_BT)


def test_more_rows_than_a_part_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = example(4, rows=40)
    rule = RejectRule(level="turn", stat="k3", reduce="sum", high=0.5)
    config = CorrectionConfig(
        weight=WeightConfig(level="turn", target_ess=0.8, high=9.0, normalize=True), reject=[rule]
    )
    whole = rollout_correction(*batch, config, turns_of(batch[2]))
    monkeypatch.setattr("megatron_rl.rollout_correction.parts.PART_TOKENS", 30)
    assert_same(rollout_correction(*batch, config, turns_of(batch[2])), whole)
    # normalised over turns with a kept token
    turns = segments(turns_of(batch[2]))
    per_turn = turns.sum(whole.flat.weights_N) / turns.sum(whole.flat.mask_N.float())
    assert float(per_turn[per_turn.isfinite()].mean()) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("policy", [policy for policy in NonFinite if policy != NonFinite.raise_])
@pytest.mark.parametrize("weight", GROUPED, ids=name)
def test_the_loss_completes_the_same_correction(weight: WeightConfig, policy: NonFinite) -> None:
    """Without a pass before the update: the driver's weights, and those of the loss in two
    micro-batches.
    """
    prox_BT, mu_BT, mask_BT = example(6)
    mu_BT[-1, 0] = float("nan")
    rule = RejectRule(level="turn", stat="ratio", reduce="min", low=0.5, when="negative_advantage")
    config = CorrectionConfig(
        weight=replace(weight, high=1.5),
        reject=[rule],
        rebaseline=False,
        renormalize=False,
        non_finite=policy,
    )
    turns_BT = turns_of(mask_BT)
    known, later = (
        rollout_correction(
            given_BT,
            mu_BT,
            mask_BT,
            config,
            turns_BT,
            lambda counted_B: group_advantages(
                torch.arange(7.0), torch.zeros(7), counted_B, AdvantageConfig()
            ),
        )
        for given_BT in (prox_BT, None)
    )
    advantages_B = known.flat.advantages_B
    pi_BT = prox_BT.clone().requires_grad_()
    inputs = replace(inputs_of(pi_BT, prox_BT, mu_BT, known, advantages_B), turns_BT=turns_BT)
    totals = count_totals(known.denominator_mask_BT, inputs.prompt_ids_B, 9)
    (expected_BT,) = torch.autograd.grad(policy_loss(inputs, LossConfig(), totals)[0], pi_BT)

    inputs = replace(
        inputs_of(pi_BT, prox_BT, mu_BT, later, advantages_B),
        anchor_logprobs_BT=None,
        turns_BT=turns_BT,
    )
    parts = [
        policy_loss(rows_of(inputs, rows), LossConfig(), totals, config)[0]
        for rows in (slice(3), slice(3, None))
    ]
    (found_BT,) = torch.autograd.grad(sum(parts), pi_BT)  # type: ignore[arg-type]
    torch.testing.assert_close(found_BT, expected_BT, rtol=1e-6, atol=1e-8)
    assert found_BT.any()


def test_a_long_turn_is_summed_as_its_row_is() -> None:
    generator = torch.Generator().manual_seed(0)
    d_BT = 0.05 * torch.randn(2, 50_000, generator=generator)
    found = segments(torch.zeros(2, 50_000, dtype=torch.int64)).sum(d_BT.flatten())
    torch.testing.assert_close(
        found.double(),
        d_BT.double().sum(dim=1),
        rtol=1e-6,
        atol=1e-6,
    )
