"""Weights with a cap by the learner's confidence.

Shape legend: B sequences, T response positions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from matrices import rollout_correction
from test_rollout_correction import example

from megatron_rl.config.correction_rules import check_correction
from megatron_rl.config.schema import ConfidenceCap, Config, CorrectionConfig, WeightConfig
from megatron_rl.preflight.notes import low_of_calibrated

CALIBRATED = WeightConfig(high=None, cap=ConfidenceCap(confidence=2.3))


def expected(d: float, p: float, weight: WeightConfig) -> float:
    assert weight.cap.confidence is not None
    cap = 1 + weight.cap.confidence * max(1 - math.exp(p), weight.cap.floor)
    ratio = math.exp(d)
    if weight.outside == "zero":
        return ratio if (weight.low or 0) <= ratio <= cap else 0.0
    return max(min(ratio, cap), weight.low or 0.0)


@pytest.mark.parametrize("changes", [{}, {"low": 0.9}, {"outside": "zero", "low": 0.8}])
def test_weights(changes: dict) -> None:
    weight = replace(CALIBRATED, **changes)
    for seed in range(3):
        prox_BT, mu_BT, mask_BT = example(seed)
        prox_BT = prox_BT.clamp(max=-1e-4)
        found = rollout_correction(prox_BT, mu_BT, mask_BT, CorrectionConfig(weight=weight))
        for row, place in mask_BT.nonzero().tolist():
            p = float(prox_BT[row, place])
            d = p - float(mu_BT[row, place])
            value = float(found.weights_BT[row, place])
            assert value == pytest.approx(expected(d, p, weight), rel=1e-5)


def test_a_confident_token_has_the_least_cap() -> None:
    prox_BT = torch.tensor([[-1e-6, -0.1, -3.0]])
    found = rollout_correction(
        prox_BT, prox_BT - 2.0, torch.ones(1, 3), CorrectionConfig(weight=CALIBRATED)
    )
    caps = [1 + 2.3 * max(1 - math.exp(p), 0.005) for p in prox_BT[0].tolist()]
    torch.testing.assert_close(found.weights_BT[0], torch.tensor(caps), rtol=1e-5, atol=0)
    assert found.metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 1.0


def test_differences_of_log_odds_by_confidence() -> None:
    """A constant displacement of the log-odds is found in every bin."""
    probs_T = torch.tensor([0.2, 0.7, 0.95, 0.995, 0.9995], dtype=torch.float64)
    sampler_T = (probs_T.logit() + 0.1).sigmoid()
    config = CorrectionConfig(weight=CALIBRATED)
    found = rollout_correction(
        probs_T.log().float()[None], sampler_T.log().float()[None], torch.ones(1, 5), config
    )
    bins = {name: value for name, value in found.metrics.items() if "log_odds" in name}
    assert len(bins) == 5
    for value in bins.values():
        assert value == pytest.approx(0.1, rel=2e-3)
    plain = rollout_correction(probs_T[None], probs_T[None], torch.ones(1, 5), CorrectionConfig())
    assert not any("log_odds" in name for name in plain.metrics)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"high": 2.0}, "correction.weight.high is 2.0"),
        ({"target_ess": 0.9}, "correction.weight.target_ess is 0.9"),
        ({"level": "sequence"}, "correction.weight.level is sequence"),
        ({"low": 1.5}, "correction.weight.low is 1.5"),
        ({"cap": ConfidenceCap(confidence=-1.0)}, "correction.weight.cap.confidence is -1"),
    ],
)
def test_what_does_not_go_together(changes: dict, key: str) -> None:
    problems = check_correction(CorrectionConfig(weight=replace(CALIBRATED, **changes)))
    assert any(problem.startswith(key) for problem in problems), problems
    assert not check_correction(CorrectionConfig(weight=CALIBRATED))


def test_a_lower_bound_is_noted() -> None:
    def notes(weight: WeightConfig) -> list[str]:
        correction = replace(Config().correction, weight=weight)
        return list(low_of_calibrated(correction))

    assert not notes(CALIBRATED)
    (note,) = notes(replace(CALIBRATED, low=0.5))
    assert note.startswith("correction.weight.low=0.5")
