"""Warmup and decay of the learning rate."""

from __future__ import annotations

import pytest

from megatron_rl.config.schema import Decay, OptimSection
from megatron_rl.learner.optimizer import learning_rate

# of ten steps after a warmup of four, to step 12
RATES = {
    Decay.constant: [1.0] * 10,
    Decay.linear: [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.2],
    Decay.cosine: [1, 0.969552, 0.882843, 0.753073, 0.6, 0.446927, 0.317157, 0.230448, 0.2, 0.2],
}


@pytest.mark.parametrize("decay", Decay)
def test_a_warmup_reaches_the_rate_on_its_last_step_and_a_decay_the_minimum(decay: Decay) -> None:
    optim = OptimSection(lr=1.0, min_lr=0.2, warmup_steps=4, decay=decay)
    rates = [learning_rate(optim, step, 12) for step in range(14)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, *RATES[decay]], abs=1e-5)


def test_no_warmup() -> None:
    assert learning_rate(OptimSection(lr=1.0, warmup_steps=0), 0, 10) == 1.0
