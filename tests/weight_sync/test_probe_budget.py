"""Budget of a probe: so many times the learner's noise, between bounds that no noise moves."""

from __future__ import annotations

import math

import pytest

from megatron_rl.config.schema import Format
from megatron_rl.weight_sync.probe_budget import (
    FP8_LEARNER,
    LEAST,
    LIMITS,
    Numerics,
    noise_budget,
)

NOISE = 0.003


@pytest.mark.parametrize("format", list(Format))
def test_a_budget_is_a_multiple_of_the_noise_between_two_bounds(format: Format) -> None:
    limit = LIMITS[format]
    middle = (LEAST + limit.most) / 2
    assert noise_budget(middle / limit.times, format, Numerics.bf16).nats == pytest.approx(middle)
    assert noise_budget(1e6, format, Numerics.bf16).nats == limit.most
    quiet = noise_budget(0.0, format, Numerics.bf16)
    assert quiet.nats == LEAST
    integers = format in (Format.int8, Format.int4)
    assert quiet.end == pytest.approx((5 if integers else 1) * LEAST)


def test_the_learner_s_arithmetic_has_its_share() -> None:
    alone, both = (
        noise_budget(NOISE, Format.fp8_block, learner) for learner in (Numerics.bf16, Numerics.fp8)
    )
    assert both.nats == pytest.approx(alone.nats + NOISE * FP8_LEARNER.times)
    most = LIMITS[Format.fp8].most + FP8_LEARNER.most
    assert noise_budget(9, Format.fp8, Numerics.fp8).nats == most
    one = noise_budget(0.01, Format.int8, Numerics.sampler)
    assert one.nats == noise_budget(0.01, Format.none, Numerics.bf16).nats
    assert one.end == one.nats
    # a learner in FP32 has half the noise
    twice = noise_budget(2 * NOISE, Format.int8, Numerics.bf16)
    assert noise_budget(NOISE, Format.int8, Numerics.fp32).nats == twice.nats


@pytest.mark.parametrize("noise", [0.0015, 0.003, 0.03])
def test_the_least_that_one_wrong_matrix_made_is_beyond_the_end(noise: float) -> None:
    assert 88 * noise > noise_budget(noise, Format.int8, Numerics.bf16).end
    assert 88 * noise > noise_budget(noise / 2, Format.int8, Numerics.fp32).end


def test_an_unknown_noise_allows_nothing() -> None:
    budget = noise_budget(math.nan, Format.int8, Numerics.bf16)
    assert math.isnan(budget.nats)
    assert not budget.end >= 0
