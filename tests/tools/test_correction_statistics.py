"""Bias and variance where they are known exactly: a table of logits whose every sequence can be
listed.
"""

import math
from itertools import pairwise

import correction_statistics as lab
import pytest
import torch

from megatron_rl.config.schema import CorrectionConfig, WeightConfig
from megatron_rl.rollout_correction.correction import apply_conditional_rules, rollout_correction

CAPS = [1.0, 1.5, 2.0, 4.0, 8.0, 64.0]


def draw(toy, count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(toy.sampler_prob_B, count, replacement=True, generator=generator)


@pytest.mark.parametrize("noise", [0.1, 0.3, 1.0])
def test_product_weights_are_unbiased_and_the_others_are_not(noise: float) -> None:
    """Over all sequences, exactly: no Monte Carlo error to hide in."""
    toy = lab.make_toy(noise)
    bias = {
        name: lab.relative_bias(toy, weight, lab.mean_reward(toy))
        for name, weight in lab.KINDS.items()
    }
    assert bias["sequence, product"] < 1e-5
    assert lab.relative_bias(toy, lab.SEQUENCE, baseline=0.0) < 1e-5
    assert 0.6 * noise < bias["token"] < bias["no correction"]
    assert bias["sequence, geometric"] > noise / 2


def test_monte_carlo() -> None:
    """Product weights miss the true gradient by their standard error, token weights by far more
    than theirs.
    """
    toy = lab.make_toy(1.0)
    count = 20_000
    rows_B = draw(toy, count)
    for weight, unbiased in ((lab.SEQUENCE, True), (lab.TOKEN, False), (lab.NONE, False)):
        gradient = lab.loss_gradient(
            toy, lab.correct(toy, weight, rows_B), toy.rewards_B[rows_B], rows_B
        )
        error = float((gradient - toy.true_gradient()).square().sum())
        _, variance = lab.gradient_moments(toy, weight)
        assert (error < 3.0 * variance / count) == unbiased, (weight.level, error, variance / count)
        assert (error > 10.0 * variance / count) != unbiased


def test_a_lower_cap_trades_bias_for_variance() -> None:
    toy = lab.make_toy(1.0)
    moments = [
        lab.gradient_moments(toy, WeightConfig(level="sequence", high=cap), lab.mean_reward(toy))
        for cap in CAPS
    ]
    for (bias, variance), (next_bias, next_variance) in pairwise(moments):
        assert next_bias < bias
        assert next_variance > variance
    assert moments[-1][0] < 1e-3 * moments[0][0]


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_logged_bias_and_variance_track_the_true_ones(level: str) -> None:
    toy = lab.make_toy(1.0)
    count = 8_000
    rows_B = draw(toy, count)
    advantages_B = toy.rewards_B - lab.mean_reward(toy)
    prox_BT = toy.logprobs(toy.logits_TVV)
    sampler_BT = toy.sampler_BT
    raw_BT = lab.correct(toy, WeightConfig(level=level, high=None)).double()
    chances_BT = (toy.sampler_prob_B[:, None] / prox_BT.shape[1]).expand_as(prox_BT)
    logged_variance = []
    for cap in CAPS:
        config = CorrectionConfig(weight=WeightConfig(level=level, high=cap))
        found = rollout_correction(
            prox_BT[rows_B], sampler_BT[rows_B], torch.ones(count, prox_BT.shape[1]), config
        )
        metrics = apply_conditional_rules(found, advantages_B[rows_B], config).metrics
        shift_BT = (raw_BT.clamp(max=cap) - raw_BT) * advantages_B[:, None]
        bias = float((shift_BT * chances_BT).sum())
        error = math.sqrt(float((shift_BT.square() * chances_BT).sum()) / count)
        assert metrics["rollout_corr/weight_bias"] == pytest.approx(bias, abs=4 * error + 1e-7)
        weighted_BT = raw_BT.clamp(max=cap) * advantages_B[:, None]
        mean = float((weighted_BT * chances_BT).sum())
        variance = float((weighted_BT.square() * chances_BT).sum()) - mean**2
        logged = metrics["rollout_corr/weight_variance"] * count * prox_BT.shape[1]
        assert logged == pytest.approx(variance, rel=0.15)
        logged_variance.append(logged)
    assert logged_variance == sorted(logged_variance)
