"""The metrics of rollout_correction against plain definitions, and against the benchmark's plain
version.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

import pytest
import torch
from matrices import batch_of, rollout_correction

from megatron_rl.batch import Share
from megatron_rl.config.schema import CorrectionConfig, RejectRule, WeightConfig
from megatron_rl.rollout_correction import correction
from megatron_rl.rollout_correction.estimates import learner_reward
from megatron_rl.tracking.metrics import unknown

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
import corrections as bench


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows and one empty row, worked by hand below."""
    mu_BT = torch.tensor(
        [
            [-1.0, -2.0, -0.5],
            [-0.25, -1.5, 0.0],
            [0.0, 0.0, 0.0],
        ]
    )
    d_BT = torch.tensor(
        [
            [math.log(3.0), math.log(0.5), 0.0],
            [math.log(0.25), math.log(2.0), 9.0],
            [5.0, 5.0, 5.0],
        ]
    )
    mask_BT = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]]).bool()
    return mu_BT + d_BT, mu_BT, mask_BT


def plain(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics by their names without the prefix."""
    return {name.removeprefix("rollout_corr/"): value for name, value in metrics.items()}


def measured(
    prox_BT: torch.Tensor, mu_BT: torch.Tensor, mask_BT: torch.Tensor | None = None, **config: Any
) -> dict[str, float]:
    if mask_BT is None:
        mask_BT = torch.ones_like(mu_BT)
    return plain(rollout_correction(prox_BT, mu_BT, mask_BT, CorrectionConfig(**config)).metrics)


def test_worked_by_hand() -> None:
    metrics = measured(*example(), weight=WeightConfig(high=2.0))
    rho = [3.0, 0.5, 1.0, 0.25, 2.0]
    weights = [2.0, 0.5, 1.0, 0.25, 2.0]
    d = [math.log(x) for x in rho]
    row_mu = [-3.5 / 3, -1.75 / 2]
    row_p = [(-3.5 + math.log(1.5)) / 3, (-1.75 + math.log(0.5)) / 2]
    gaps = [m - p for m, p in zip(row_mu, row_p, strict=True)]
    mean = fmean(weights)
    square = fmean(w * w for w in weights)
    expected = {
        "kl": -fmean(d),
        "k3_kl": fmean(x - 1 - y for x, y in zip(rho, d, strict=True)),
        "chi2_token": fmean(x * x for x in rho) - 1,
        "chi2_seq": (1.5**2 + 0.5**2) / 2 - 1,
        "rho_mean": 1.35,
        "rho_min": 0.25,
        "rho_max": 3.0,
        "mult_prob_error": (3 + 2 + 1 + 4 + 2) / 5,
        "logp_abs_diff_max": math.log(4.0),
        "training_ppl": fmean(math.exp(-x) for x in row_p),
        "rollout_ppl": fmean(math.exp(-x) for x in row_mu),
        "log_ppl_diff": fmean(gaps),
        "log_ppl_abs_diff": fmean(map(abs, gaps)),
        "ppl_ratio": fmean(map(math.exp, gaps)),
        "rollout_is_mean": mean,
        "rollout_is_std": math.sqrt(square - mean * mean),
        "rollout_is_min": 0.25,
        "rollout_is_max": 2.0,
        "rollout_is_eff_sample_size": mean * mean / square,
        "rollout_is_ratio_fraction_high": 0.2,
        "rollout_is_ratio_fraction_low": 0.2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_level_none_describes_the_raw_ratio() -> None:
    metrics = measured(*example(), weight=WeightConfig(level="none"))
    assert metrics["rollout_is_mean"] == pytest.approx(1.35, abs=1e-6)
    assert metrics["rollout_is_max"] == pytest.approx(3.0, abs=1e-6)
    assert metrics["rollout_is_eff_sample_size"] < 0.8


def test_sequence_fractions_count_rows() -> None:
    metrics = measured(*example(), weight=WeightConfig(level="sequence", high=1.2))
    assert metrics["rollout_is_ratio_fraction_high"] == pytest.approx(0.5)  # 1.5 of (1.5, 0.5)
    assert metrics["rollout_is_ratio_fraction_low"] == pytest.approx(0.5)
    assert metrics["rollout_is_max"] == pytest.approx(1.2)


def test_masked_fractions() -> None:
    metrics = measured(*example(), reject=[RejectRule(level="token", stat="ratio", high=2.5)])
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(0.2)
    assert metrics["rollout_rs_seq_masked_fraction"] == pytest.approx(0.5)
    assert metrics["rollout_is_max"] == pytest.approx(2.0)


def test_normalized_weights_are_described_after_the_division() -> None:
    found, before = (
        measured(*example(), weight=WeightConfig(high=2.0, normalize=normalize))
        for normalize in (True, False)
    )
    expected = {
        f"rollout_is_{name}": before[f"rollout_is_{name}"] / before["rollout_is_mean"]
        for name in ("mean", "std", "max")
    }
    expected["rollout_is_eff_sample_size"] = before["rollout_is_eff_sample_size"]
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-6)


def test_bias_and_variance_of_the_weights() -> None:
    config = CorrectionConfig(weight=WeightConfig(high=2.0))
    advantages_B = torch.tensor([1.0, -2.0, 7.0])
    found = rollout_correction(
        *example(), config, judge=lambda _: (advantages_B, advantages_B.isfinite())
    )
    wa = [2.0, 0.5, 1.0, -0.5, -4.0]
    rho_a = [3.0, 0.5, 1.0, -0.5, -4.0]
    bias = fmean(wa) - fmean(rho_a)
    assert found.metrics["rollout_corr/weight_bias"] == pytest.approx(bias, abs=1e-6)
    assert found.metrics["rollout_corr/weight_variance"] == pytest.approx(
        pvariance(wa) / 5, abs=1e-6
    )


def test_narrowing_brings_the_metrics_up_to_date() -> None:
    config = CorrectionConfig(weight=WeightConfig(high=2.0))
    prox_BT, mu_BT, mask_BT = example()
    keep_B = torch.tensor([True, False, True])
    found = rollout_correction(
        prox_BT, mu_BT, mask_BT, config, judge=lambda _: (torch.ones(3), keep_B)
    )
    narrowed = plain(found.metrics)
    again = measured(prox_BT, mu_BT, mask_BT & keep_B[:, None], weight=config.weight)
    for name in ("mean", "std", "min", "max", "eff_sample_size", "ratio_fraction_high"):
        key = f"rollout_is_{name}"
        assert narrowed[key] == pytest.approx(again[key], abs=1e-6), name
    assert narrowed["rollout_rs_masked_fraction"] == pytest.approx(0.4)


def test_small_deviations_survive_float32() -> None:
    """d of 1e-4: a variance from plain sums of squares, or k3 from exp(d) - 1 - d, would be
    rounding noise.
    """
    generator = torch.Generator().manual_seed(0)
    mu_BT = -torch.rand(64, 512, generator=generator).double()
    d_BT = 1e-4 * torch.randn(64, 512, generator=generator).double()
    metrics = measured(mu_BT + d_BT, mu_BT)
    deviation = float(d_BT.exp().std(correction=0))
    assert metrics["rho_std"] == pytest.approx(deviation, rel=1e-3)
    assert metrics["rollout_is_std"] == pytest.approx(deviation, rel=1e-2)
    assert metrics["k3_kl"] == pytest.approx(float((d_BT.expm1() - d_BT).mean()), rel=1e-2)


@pytest.mark.parametrize("d", [0.3, -11.3, 0.0])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (160, 1000)])  # the last takes two parts
def test_equal_values_have_no_deviation(d: float, shape: tuple[int, int]) -> None:
    """A variance from plain sums of squares would be the rounding of the mean, and its root
    large.
    """
    mu_BT = torch.full(shape, -1.7)
    for weight in (
        WeightConfig(high=None),
        WeightConfig(level="sequence", aggregate="geometric", high=None),
    ):
        metrics = measured(mu_BT + d, mu_BT, weight=weight)
        size = max(1.0, abs(d), metrics["rho_max"])
        for name in ("rho", "logp_abs_diff", "probs_diff", "rollout_is"):
            assert metrics[f"{name}_std"] == pytest.approx(0.0, abs=1e-6 * size), name
        assert metrics["probs_pearson_corr"] == 0.0  # two constants have none


@pytest.mark.parametrize("first", [0, 1])
def test_one_far_token_in_a_part_of_its_own_spoils_no_deviation(first: int) -> None:
    """Parts are added about their own means: no part sets the scale of another."""
    generator = torch.Generator().manual_seed(0)
    d_BT = 0.02 * torch.randn(2, 70_000, generator=generator)  # a row is a part
    d_BT[first, 0] = 9.0
    mask_BT = torch.ones(2, 70_000, dtype=torch.bool)
    mask_BT[first, 1:] = False
    metrics = measured(d_BT, torch.zeros_like(d_BT), mask_BT, weight=WeightConfig(high=None))
    exact = float(d_BT[mask_BT].double().exp().std(correction=0))
    for name in ("rho_std", "rollout_is_std"):
        assert metrics[name] == pytest.approx(exact, rel=1e-5), name


def test_two_signs_of_one_distance_have_no_deviation() -> None:
    mu_BT = torch.full((1, 4), -2.0)
    metrics = measured(mu_BT + torch.tensor([[0.7, -0.7, -0.7, 0.7]]), mu_BT)
    assert metrics["logp_abs_diff_std"] == pytest.approx(0.0, abs=1e-6)


def test_the_correlation_of_nearly_equal_probabilities() -> None:
    """All tokens nearly certain: their spread is a thousandth of their mean."""
    generator = torch.Generator().manual_seed(0)
    mu_BT = -1e-3 * torch.rand(8, 50, generator=generator)
    prox_BT = mu_BT - 5e-4 * torch.rand(8, 50, generator=generator)
    pairs = torch.stack([prox_BT, mu_BT]).double().exp().flatten(1)
    exact = float(torch.corrcoef(pairs)[0, 1])
    assert measured(prox_BT, mu_BT)["probs_pearson_corr"] == pytest.approx(exact, abs=1e-3)


def test_ratios_are_clamped_before_they_are_squared() -> None:
    """A row's product of 12 is inside the clamp, its square of 24 is no exponent of its own; as for
    tokens.
    """
    mu_BT = torch.full((1, 1), -15.0)
    for d, ratio in [(12.0, math.exp(12.0)), (25.0, math.exp(20.0))]:
        metrics = measured(mu_BT + d, mu_BT)
        for name in ("chi2_token", "chi2_seq"):
            assert metrics[name] == pytest.approx(ratio**2 - 1, rel=1e-5), name


def test_agrees_with_the_plain_version() -> None:
    prox_BT, mu_BT, mask_BT = bench.example(96, 200)
    # a milder mismatch on half of the rows, so that the geometric rule keeps some and rejects some
    prox_BT[1::2] += 0.02
    fast = rollout_correction(prox_BT, mu_BT, mask_BT, bench.CONFIG)
    weights_BT, kept_BT, metrics = bench.plain(prox_BT, mu_BT, mask_BT)
    assert 0.2 < fast.metrics["rollout_corr/rollout_rs_masked_fraction"] < 0.8
    assert torch.equal(fast.mask_BT, kept_BT)
    torch.testing.assert_close(fast.weights_BT, weights_BT, rtol=1e-6, atol=1e-6)
    shift = (weights_BT - (prox_BT - mu_BT).exp())[kept_BT].mean()
    variance = weights_BT[kept_BT].var(correction=0) / kept_BT.sum()
    metrics["rollout_corr/weight_bias"] = float(shift)
    metrics["rollout_corr/weight_variance"] = float(variance)
    assert set(metrics) == set(fast.metrics)
    for name, value in metrics.items():
        assert fast.metrics[name] == pytest.approx(value, rel=2e-5, abs=2e-6), name


def test_memory() -> None:
    """Beside its inputs: the weights, two masks, and parts that do not grow with the batch."""
    prox_BT, mu_BT, mask_BT = bench.example(512, 2048)
    given = (batch_of(mask_BT, mu_BT), prox_BT.flatten(), bench.CONFIG)
    peak = bench.peak_bytes(lambda: correction.rollout_correction(*given))
    assert 1.5 * prox_BT.nbytes < peak < 4 * prox_BT.nbytes


def test_metrics_are_plain_numbers_of_the_table() -> None:
    """They are written as JSON."""
    config = CorrectionConfig(
        weight=WeightConfig(target_ess=0.9),
        reject=[RejectRule(stat="ratio", reduce="max", high=3.5)],
    )
    prox_BT, mu_BT, mask_BT = example()
    prox_BT[0, 1] = math.nan
    metrics = rollout_correction(prox_BT, mu_BT, mask_BT, config).metrics
    assert unknown(metrics) == []
    metrics |= learner_reward(prox_BT.flatten(), Share.alone(batch_of(mask_BT, mu_BT)))
    assert {type(value) for value in metrics.values()} == {float}


@pytest.mark.parametrize("shift", [-25.0, 25.0])
def test_probabilities_stay_true_where_the_ratio_is_bounded(shift: float) -> None:
    """A learner that is e^25 off: the bound on the exponent of rho leaves the two probabilities."""
    pair = torch.tensor([math.log(0.5) + min(shift, 0.0), math.log(0.5) - max(shift, 0.0)])
    metrics = measured(*pair.view(2, 1, 1))
    assert metrics["probs_diff_max"] == pytest.approx(0.5, abs=1e-6)
    assert metrics["logp_abs_diff_max"] == pytest.approx(25.0, abs=1e-5)
    assert metrics["rho_max"] == pytest.approx(math.exp(math.copysign(20.0, shift)), rel=1e-5)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_extremes_of_one_sign_are_not_the_zeros_of_the_padding(sign: float) -> None:
    d_BT = sign * torch.tensor([[0.1, 0.3, 5.0], [0.2, 5.0, 5.0]])
    mask_BT = torch.tensor([[True, True, False], [True, False, False]])
    metrics = measured(d_BT, torch.zeros(2, 3), mask_BT)
    low, high = sorted([math.exp(sign * 0.1), math.exp(sign * 0.3)])
    for name in ("rho", "rollout_is"):
        assert metrics[f"{name}_min"] == pytest.approx(low)
        assert metrics[f"{name}_max"] == pytest.approx(high)
