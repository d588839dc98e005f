"""Limits of the probe for each weight format: maximum difference of sampler and learner after a
sync, in nats, as multiples of one rounding's effect; the probe's size, in prompts and tokens.

The effect of one more rounding scales with the model like that of a format; the learner measures it
on its own weights (learner/weights.py), so that a wrong sampler does not raise it. Rare tokens are
noisier: hence an upper bound on every budget. Integer formats may reach that bound because of
outliers of the activations (docs/concepts/weight-sync.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.config.schema import Format

# one response each: a format that errs at a prompt errs in all of its responses
PROBE_PROMPTS = 64
PROBE_TOKENS = 128  # per response, at most


@dataclass(frozen=True)
class Limit:
    times: float  # multiple of the noise
    most: float  # upper bound in nats, at any noise


# above the largest measurement in correct setups, and for FP8 below the smallest effect of one
# wrong matrix: 15 (docs/concepts/weight-sync.md). Not measured: blocks, whose scales are finer than those of
# rows, and learners in FP8
LIMITS: Mapping[Format, Limit] = {
    Format.none: Limit(6, 0.1),
    Format.int8: Limit(10, 0.3),
    Format.int4: Limit(40, 1.0),
    Format.fp8: Limit(14, 0.4),
    Format.fp8_block: Limit(14, 0.4),
}
# for integers, as a multiple of the budget and in nats: above the largest effect of outliers in
# correct setups, 2.9 and 0.37, and below the smallest effect of one wrong matrix in a trained
# model, 8.8 and 1.3
WRONG = 5
WRONG_NATS = 0.6
INTEGERS = frozenset({Format.int8, Format.int4})
FP8_LEARNER = Limit(14, 0.4)  # added if the learner rounds to eight bits as well
# factor for an FP32 learner, whose noise is about half of a BF16 learner's
FP32_LEARNER = 2
LEAST = 0.02  # nats: for a low-entropy policy single tokens dominate the mean


@dataclass(frozen=True)
class Budget:
    nats: float
    origin: str
    end: float  # nats: a larger difference is an error in any model


class Numerics(StrEnum):
    """Arithmetic of the learner."""

    bf16 = "a BF16 learner"
    fp32 = "an FP32 learner"
    fp8 = "an FP8 learner"
    # its logprobs then differ no more than with BF16
    sampler = "a learner that computes as the sampler does"


def noise_budget(noise: float, format: Format, learner: Numerics) -> Budget:
    limit = LIMITS[Format.none if learner is Numerics.sampler else format]
    if learner is Numerics.fp8:
        limit = Limit(limit.times + FP8_LEARNER.times, limit.most + FP8_LEARNER.most)
    elif learner is Numerics.fp32:
        limit = Limit(limit.times * FP32_LEARNER, limit.most)
    pair = (
        f"{'BF16' if format == Format.none else format.upper()} weights in the sampler, {learner}"
    )
    origin = (
        f"sync.probe_budget=auto: {limit.times:g} times the learner's noise of {noise:.3g}; {pair}"
    )
    nats = limit.times * noise
    if nats > limit.most:
        nats = limit.most
        origin = f"{origin}, at most {limit.most:g}"
    elif nats < LEAST:
        nats = LEAST
        origin = f"{origin}, at least {LEAST:g}"
    outliers = format in INTEGERS and learner is not Numerics.sampler
    return Budget(
        nats,
        origin,
        min(WRONG * nats, max(limit.most, WRONG_NATS)) if outliers else nats,
    )
