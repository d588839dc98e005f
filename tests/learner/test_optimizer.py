"""Warmup and decay of the learning rate."""

from __future__ import annotations

import pytest

from megatron_rl.config.schema import OptimSection
from megatron_rl.learner.optimizer import learning_rate


def _rates(**keys: object) -> list[float]:
    optim = OptimSection(lr=1.0, min_lr=0.2, warmup_steps=4, **keys)  # type: ignore[arg-type]
    return [learning_rate(optim, step, 12) for step in range(14)]


def test_warmup_reaches_the_rate_on_its_last_step() -> None:
    assert _rates()[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_constant_stays() -> None:
    assert set(_rates()[4:]) == {1.0}


def test_linear_falls_to_the_minimum_and_stays_there() -> None:
    assert _rates(decay="linear")[4:] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = _rates(decay="cosine")
    assert rates[4] == 1.0
    assert rates[8] == pytest.approx(0.6)
    assert rates[12] == rates[13] == pytest.approx(0.2)


def test_no_warmup() -> None:
    assert learning_rate(OptimSection(lr=1.0, warmup_steps=0), 0, 10) == 1.0
