"""Properties of every batch: hypothesis draws shapes, masks, mismatch and config.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import inputs_of
from matrices import Corrected, LossInputs, count_totals, policy_loss, rollout_correction

from megatron_rl.advantage import AdvantageConfig, group_advantages
from megatron_rl.config.schema import (
    TOP_STATS,
    Aggregate,
    CorrectionConfig,
    Level,
    LossConfig,
    LossName,
    NonFinite,
    Outside,
    Reduce,
    Reduction,
    RejectRule,
    Stat,
    WeightConfig,
)

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# the same examples in every run; more of them, on demand, when the code changes
EXAMPLES = settings(
    max_examples=int(os.environ.get("PROPERTY_EXAMPLES", "60")), deadline=None, derandomize=True
)
GARBAGE = [math.nan, math.inf, -math.inf, 3e38]


@st.composite
def batches(draw: st.DrawFn, faults: bool = False) -> Batch:
    rows = draw(st.integers(1, 7))
    columns = draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    mu_BT = -3 * torch.rand(rows, columns, generator=generator)
    spread = draw(st.sampled_from([0.0, 1e-3, 0.3, 5.0]))
    prox_BT = mu_BT + spread * torch.randn(rows, columns, generator=generator)
    mask_BT = torch.rand(rows, columns, generator=generator) < draw(
        st.sampled_from([0.0, 0.4, 1.0])
    )
    if faults:
        for logprobs_BT in (mu_BT, prox_BT):
            where_BT = torch.rand(rows, columns, generator=generator) < 0.15
            logprobs_BT[where_BT] = draw(st.sampled_from(GARBAGE[:3]))
    return prox_BT, mu_BT, mask_BT


bounds = st.sampled_from(
    [
        (None, 2.0),
        (0.5, 2.0),
        (0.9, None),
        (0.95, 1.05),
        (None, 0.5),
    ]
)


@st.composite
def weights(draw: st.DrawFn, whole_batch: bool = True) -> WeightConfig:
    level = draw(st.sampled_from(list(Level)))
    low, high = draw(bounds)
    aggregates = {"none": 1, "token": 1, "sequence": 2, "turn": 2, "prefix": 3, "segment": 2}[level]
    aggregate = draw(st.sampled_from(list(Aggregate)[:aggregates]))
    config = WeightConfig(level=level, aggregate=aggregate, low=low, high=high)
    if level == "none":
        return replace(config, low=None)
    config = replace(config, outside=draw(st.sampled_from(list(Outside))))
    if whole_batch:
        config = replace(config, normalize=draw(st.booleans()))
        if config.outside == "truncate" and (low or 0) <= 1 <= (high or 2) and draw(st.booleans()):
            config = replace(config, target_ess=draw(st.sampled_from([0.5, 0.9, 0.99])))
    return config


@st.composite
def rules(draw: st.DrawFn, whole_batch: bool = True) -> RejectRule:
    stat = draw(st.sampled_from([one for one in Stat if one not in TOP_STATS]))
    level = draw(st.sampled_from(list(Level)[1:]))
    reduce = draw(st.sampled_from(list(Reduce))) if level != "token" else None
    if whole_batch and draw(st.booleans()):
        return RejectRule(
            level=level, stat=stat, reduce=reduce, budget=draw(st.sampled_from([0.05, 1.1, 5.0]))
        )
    low, high = draw(
        st.sampled_from(
            [
                (None, 1.2),
                (0.8, 1.2),
                (0.9, None),
                (None, 0.1),
                (0.01, 0.5),
            ]
        )
    )
    when = draw(st.sampled_from([None, "negative_advantage"]))
    return RejectRule(
        level=level,
        stat=stat,
        reduce=reduce,
        low=low,
        high=high,
        when=when,
    )


@st.composite
def configs(draw: st.DrawFn, whole_batch: bool = True) -> CorrectionConfig:
    return CorrectionConfig(
        weight=draw(weights(whole_batch)),
        reject=draw(st.lists(rules(whole_batch), max_size=2)),
        renormalize=draw(st.booleans()),
        non_finite=draw(
            st.sampled_from([NonFinite.drop, NonFinite.one, NonFinite.zero, NonFinite.reject])
        ),
    )


def run(
    batch: Batch, config: CorrectionConfig, advantages_B: torch.Tensor | None = None
) -> Corrected:
    if advantages_B is None:
        advantages_B = torch.linspace(-1, 1, len(batch[0]))
    return rollout_correction(
        *batch, config, judge=lambda counted_B: (advantages_B, torch.ones_like(counted_B))
    )


def assert_same(one: Corrected, other: Corrected, exact: bool = False) -> None:
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 2e-5, "atol": 1e-6}
    torch.testing.assert_close(one.weights_BT, other.weights_BT, **tolerance)
    assert torch.equal(one.mask_BT, other.mask_BT)
    assert torch.equal(one.denominator_mask_BT, other.denominator_mask_BT)
    assert set(one.metrics) == set(other.metrics)
    for name, value in one.metrics.items():
        scale = max(1.0, abs(value))
        assert abs(value - other.metrics[name]) <= (0.0 if exact else 2e-4 * scale), name


def far_from_bounds(batch: Batch, config: CorrectionConfig) -> bool:
    """Return true if no verdict depends on the last bits of d."""
    prox_BT, mu_BT, mask_BT = batch
    verdicts = [
        run(
            (
                prox_BT * (1 + sign * 1e-6) + sign * 1e-6,
                mu_BT,
                mask_BT,
            ),
            config,
        ).mask_BT
        for sign in (-1.0, 1.0)
    ]
    return torch.equal(*verdicts)


@EXAMPLES
@given(batches(faults=True), configs())
def test_always_finite_zero_outside_and_inside_the_original(
    batch: Batch, config: CorrectionConfig
) -> None:
    found = run(batch, config)
    assert bool(torch.isfinite(found.weights_BT).all())
    assert bool((found.weights_BT >= 0).all())
    assert not found.weights_BT[~found.mask_BT].any()
    assert not (found.mask_BT & ~found.denominator_mask_BT).any()
    assert not (found.denominator_mask_BT & ~batch[2]).any()
    assert all(math.isfinite(value) for value in found.metrics.values())


@EXAMPLES
@given(
    batches(faults=True),
    configs(),
    st.integers(1, 4),
    st.sampled_from(GARBAGE),
    st.sampled_from(GARBAGE),
)
def test_padding_changes_nothing(
    batch: Batch, config: CorrectionConfig, extra: int, one: float, two: float
) -> None:
    prox_BT, mu_BT, mask_BT = batch
    plain = run(batch, config)
    dirty = run(
        (
            prox_BT.masked_fill(~mask_BT, one),
            mu_BT.masked_fill(~mask_BT, two),
            mask_BT,
        ),
        config,
    )
    assert_same(plain, dirty, exact=True)
    rows, columns = mask_BT.shape
    tail = (
        torch.full((rows, extra), one),
        torch.full((rows, extra), two),
        torch.zeros(rows, extra, dtype=torch.bool),
    )
    longer = run(tuple(torch.cat(pair, dim=1) for pair in zip(batch, tail, strict=True)), config)  # type: ignore[arg-type]
    if far_from_bounds(batch, config):
        cut = {
            name: getattr(longer, name)[:, :columns]
            for name in ("weights_BT", "mask_BT", "denominator_mask_BT")
        }
        assert_same(plain, replace(longer, **cut))
    assert not longer.weights_BT[:, columns:].any()


@EXAMPLES
@given(batches(faults=True), configs(), st.randoms(use_true_random=False))
def test_row_order_changes_nothing(batch: Batch, config: CorrectionConfig, random) -> None:
    order = list(range(len(batch[0])))
    random.shuffle(order)
    advantages_B = torch.linspace(-1, 1, len(order))
    if not far_from_bounds(batch, config):
        return
    plain = run(batch, config, advantages_B)
    moved = run(tuple(one[order] for one in batch), config, advantages_B[order])  # type: ignore[arg-type]
    rows = {
        name: getattr(plain, name)[order]
        for name in ("weights_BT", "mask_BT", "denominator_mask_BT")
    }
    assert_same(replace(plain, **rows), moved)


@EXAMPLES
@given(
    batches(faults=True),
    configs(whole_batch=False),
    st.integers(0, 7),
)
def test_without_batch_wide_options_any_split_gives_the_same(
    batch: Batch, config: CorrectionConfig, cut: int
) -> None:
    cut = min(cut, len(batch[0]))
    whole = rollout_correction(*batch, config)
    parts = [
        rollout_correction(*(one[rows] for one in batch), config)
        for rows in (slice(cut), slice(cut, None))
    ]
    for name in ("weights_BT", "mask_BT", "denominator_mask_BT", "rejected_B"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


@EXAMPLES
@given(batches(), configs())
def test_dtypes_agree_beyond_rounding(batch: Batch, config: CorrectionConfig) -> None:
    prox_BT, mu_BT, mask_BT = batch
    if far_from_bounds(batch, config):
        wide = run((prox_BT.double(), mu_BT.double(), mask_BT), config)
        assert_same(run(batch, config), wide)
        assert_same(
            wide, run((prox_BT.double(), mu_BT.double(), mask_BT.float()), config), exact=True
        )
        assert wide.weights_BT.dtype == torch.float32


@EXAMPLES
@given(batches(), weights(), st.lists(rules(), max_size=1))
def test_weights_are_bounded_or_average_one_and_ess_is_a_fraction(
    batch: Batch, weight: WeightConfig, reject: list[RejectRule]
) -> None:
    found = run(batch, CorrectionConfig(weight=weight, reject=reject))
    kept = found.weights_BT[found.mask_BT]
    if not len(kept):
        return
    ess = found.metrics["rollout_corr/rollout_is_eff_sample_size"]
    if kept.any():
        assert 0 < ess <= 1
    if weight.level == "none":
        assert bool((kept == 1).all())
    elif weight.normalize and kept.any():
        rows_B1 = torch.where(found.mask_BT, found.weights_BT, -1).amax(dim=1)
        average = (
            kept.mean()
            if weight.level in ("token", "prefix")
            else rows_B1[found.mask_BT.any(1)].mean()
        )
        torch.testing.assert_close(average, torch.ones(()), rtol=1e-4, atol=1e-4)
    elif not weight.normalize:
        low = weight.low or 0.0
        high = math.inf if weight.high is None else weight.high
        inside = (kept >= low - 1e-6) & (kept <= high + 1e-6)
        assert bool((inside | ((kept == 0) & (weight.outside == "zero"))).all())
    if weight.target_ess is not None:
        cap = found.metrics["rollout_corr/cap"]
        assert 1.0 <= cap <= (math.inf if weight.high is None else weight.high) + 1e-6
        # masks after the cap was solved
        conditional = any(rule.when is not None for rule in reject)
        assert conditional or cap == 1.0 or weight.low or ess >= weight.target_ess - 1e-4


@st.composite
def losses(draw: st.DrawFn) -> LossConfig:
    name = draw(st.sampled_from(list(LossName)))
    reduction = draw(st.sampled_from(list(Reduction)))
    return LossConfig(
        name=name,
        reduction=reduction,
        kl_coef=draw(st.sampled_from([0.0, 0.1])),
        params={"dual_clip": 3.0},
    )


def loss_inputs(batch: Batch, found: Corrected, advantages_B: torch.Tensor) -> LossInputs:
    prox_BT, mu_BT, _mask_BT = batch
    generator = torch.Generator().manual_seed(0)
    row_B1 = torch.arange(len(prox_BT))[:, None] * 0.1
    pi_BT = (prox_BT - 0.2 * mu_BT.cos() + row_B1).detach().requires_grad_()
    return replace(
        inputs_of(pi_BT, prox_BT, mu_BT, found, advantages_B),
        ref_logprobs_BT=mu_BT,
        prompt_ids_B=torch.randint(0, 3, (len(prox_BT),), generator=generator),
        selected_BT=mu_BT.frac() < -0.5,
    )


def gradient(loss: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    return torch.autograd.grad(loss, inputs.logprobs_BT)[0]


@EXAMPLES
@given(
    batches(),
    configs(),
    losses(),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
)
def test_losses_ignore_split_order_and_padding(
    batch: Batch, config: CorrectionConfig, loss_config: LossConfig, random, parts: int
) -> None:
    """The whole path: correction, baselines over survivors, conditional rules, loss; then cut,
    shuffled and padded.
    """
    rows, columns = batch[0].shape
    rewards_B = torch.arange(rows).float() % 3
    groups_B = torch.arange(rows) // 3
    found = rollout_correction(
        *batch,
        config,
        judge=lambda counted_B: group_advantages(rewards_B, groups_B, counted_B, AdvantageConfig()),
    )
    inputs = loss_inputs(batch, found, found.flat.advantages_B)
    totals = count_totals(inputs.denominator_mask_BT, inputs.prompt_ids_B, horizon=columns)
    whole, _ = policy_loss(inputs, loss_config, totals)
    whole_gradient = gradient(whole, inputs)
    assert bool(torch.isfinite(whole_gradient).all())

    order = list(range(rows))
    random.shuffle(order)

    def padded(value: torch.Tensor | None, index: list[int]) -> torch.Tensor | None:
        if value is None or value.dim() == 1:
            return None if value is None else value[index]
        filler = torch.full((len(index), 2), math.nan if value.is_floating_point() else 0)
        return torch.cat([value[index], filler.to(value.dtype)], dim=1)

    split = torch.zeros(())
    for part in range(parts):
        index = order[part::parts]
        micro = LossInputs(**{name: padded(value, index) for name, value in vars(inputs).items()})  # type: ignore[arg-type]
        split = split + policy_loss(micro, loss_config, totals)[0]
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient(split, inputs), whole_gradient, rtol=1e-4, atol=1e-5)


def test_every_loss_survives_every_non_finite_policy() -> None:
    """NaN and infinities on both sides, at kept tokens and in padding: loss and gradient stay
    finite.
    """
    generator = torch.Generator().manual_seed(5)
    mu_BT = -torch.rand(6, 8, generator=generator)
    prox_BT = mu_BT + 0.1 * torch.randn(6, 8, generator=generator)
    mask_BT = torch.rand(6, 8, generator=generator) < 0.7
    clean_pi_BT = prox_BT.clone()
    for place, value in enumerate(GARBAGE[:3] * 6):
        (mu_BT if place % 2 else prox_BT)[place % 6, (place * 3) % 8] = value
    for policy, name in itertools.product(["drop", "one", "zero", "reject"], LossName):
        config = CorrectionConfig(non_finite=policy)
        found = run((prox_BT, mu_BT, mask_BT), config)
        assert found.mask_BT.any(), policy
        inputs = loss_inputs(
            (prox_BT, mu_BT, mask_BT),
            found,
            torch.linspace(-1, 1, 6),
        )
        pi_BT = clean_pi_BT.masked_fill(~mask_BT, math.nan).requires_grad_()
        inputs = replace(inputs, logprobs_BT=pi_BT)
        loss, metrics = policy_loss(inputs, LossConfig(name=name))
        assert math.isfinite(float(loss.detach())), (policy, name)
        assert bool(torch.isfinite(gradient(loss, inputs)).all()), (policy, name)
        assert all(math.isfinite(float(value)) for value in metrics.values())
