"""What a probe may find: so many times the learner's noise, within bounds that no noise moves."""

from __future__ import annotations

import math

import pytest

from megatron_rl.config.schema import Format
from megatron_rl.weight_sync.probe_budget import FP8_LEARNER, LEAST, LIMITS, Arithmetic, measured, set_by_hand

NOISE = 0.003


@pytest.mark.parametrize("format", list(Format))
def test_a_budget_is_a_multiple_of_the_noise_between_two_bounds(format: Format) -> None:
    limit = LIMITS[format]
    middle = (LEAST + limit.most) / 2
    budget = measured(middle / limit.times, format, Arithmetic.bf16)
    assert budget.nats == pytest.approx(middle)
    assert budget.origin.startswith(f"sync.probe_budget=auto: {limit.times:g} times the learner's noise of ")
    weights = "BF16" if format == Format.none else format.upper()
    assert budget.origin.endswith(f"; {weights} weights in the sampler, a BF16 learner")
    loud = measured(1e6, format, Arithmetic.bf16)
    assert loud.nats == limit.most <= 1
    assert loud.origin.endswith(f"at most {limit.most:g}")
    quiet = measured(LEAST / limit.times / 100, format, Arithmetic.bf16)
    assert quiet.nats == LEAST
    assert quiet.origin.endswith(f"at least {LEAST:g}")


def test_a_format_with_fewer_bits_may_differ_by_more() -> None:
    bf16, int8, fp8, int4 = (
        measured(0.01, format, Arithmetic.bf16).nats for format in (Format.none, Format.int8, Format.fp8, Format.int4)
    )
    assert bf16 < int8 < fp8 < int4


def test_a_learner_that_rounds_to_eight_bits_as_well_has_its_share() -> None:
    alone, both = (measured(NOISE, Format.fp8_block, learner) for learner in (Arithmetic.bf16, Arithmetic.fp8))
    assert both.nats == pytest.approx(alone.nats + NOISE * FP8_LEARNER.times)
    most = LIMITS[Format.fp8].most + FP8_LEARNER.most
    assert measured(9, Format.fp8, Arithmetic.fp8).nats == most


def test_one_arithmetic_has_the_budget_of_a_bf16_pair() -> None:
    budget = measured(0.01, Format.int8, Arithmetic.sampler)
    assert budget.nats == measured(0.01, Format.none, Arithmetic.bf16).nats
    assert budget.origin.endswith("INT8 weights in the sampler, a learner that computes as the sampler does")


def test_a_learner_in_fp32_has_half_the_noise() -> None:
    assert measured(NOISE, Format.int8, Arithmetic.fp32).nats == measured(2 * NOISE, Format.int8, Arithmetic.bf16).nats


def test_what_could_not_be_measured_allows_nothing() -> None:
    assert math.isnan(measured(math.nan, Format.int8, Arithmetic.bf16).nats)


def test_a_number_is_taken_as_it_is() -> None:
    assert (set_by_hand(7.0).nats, set_by_hand(7.0).origin) == (7.0, "sync.probe_budget")
