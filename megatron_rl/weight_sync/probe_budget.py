"""Table of the probe's limits for each weight format: how far sampler and learner may differ after
a sync, in nats, as multiples of one rounding's effect; the probe's size, in prompts and tokens.

The noise of one rounding more grows with a model as what a format adds does; the learner tells it
of its own weights (learner/weights.py), so that a wrong sampler does not raise it. Odd tokens are
noisier: hence an end to every budget. Of integers, which outliers of the activations enlarge, both
may be right up to that end (docs/weight_sync.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.config.schema import Format

# one answer each: where a format errs at a prompt, it errs in all of its answers
PROBE_PROMPTS = 64
PROBE_TOKENS = 128  # of a response, at most


@dataclass(frozen=True)
class Limit:
    times: float  # the noise
    most: float  # nats, whatever the noise


# above the worst that was measured where all is right, and FP8's still below the least that one
# wrong matrix made: 15 (docs/weight_sync.md). Not measured: blocks, whose scales are finer than
# those of rows, and learners in FP8
LIMITS: Mapping[Format, Limit] = {
    Format.none: Limit(6, 0.1),
    Format.int8: Limit(10, 0.3),
    Format.int4: Limit(40, 1.0),
    Format.fp8: Limit(14, 0.4),
    Format.fp8_block: Limit(14, 0.4),
}
# of integers, times the budget and in nats: above the worst that outliers made where all is right,
# 2.9 and 0.37, and below the least that one wrong matrix made in a trained model, 8.8 and 1.3
WRONG = 5
WRONG_NATS = 0.6
INTEGERS = frozenset({Format.int8, Format.int4})
FP8_LEARNER = Limit(14, 0.4)  # more, where the learner rounds to eight bits as well
# times as many: it rounds nothing else, so that its noise is about half of a BF16 learner's
FP32_LEARNER = 2
LEAST = 0.02  # nats: of a policy that is all but certain, single tokens make the mean


@dataclass(frozen=True)
class Budget:
    nats: float
    origin: str
    end: float  # nats: beyond it something is wrong, whatever the model


class Numerics(StrEnum):
    """Arithmetic of the learner."""

    bf16 = "a BF16 learner"
    fp32 = "an FP32 learner"
    fp8 = "an FP8 learner"
    # then its format tells them apart no more than BF16
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
    told = (
        f"sync.probe_budget=auto: {limit.times:g} times the learner's noise of {noise:.3g}; {pair}"
    )
    nats = limit.times * noise
    if nats > limit.most:
        nats = limit.most
        told = f"{told}, at most {limit.most:g}"
    elif nats < LEAST:
        nats = LEAST
        told = f"{told}, at least {LEAST:g}"
    outliers = format in INTEGERS and learner is not Numerics.sampler
    return Budget(
        nats,
        told,
        min(WRONG * nats, max(limit.most, WRONG_NATS)) if outliers else nats,
    )
