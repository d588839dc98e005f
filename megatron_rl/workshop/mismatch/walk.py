"""Walk through a forward pass point by point, learner beside engine: how far values differ, and
what KL enters where.

Three ways to look at a point (models/points.py), for each sequence:
- apart: each side has computed by itself, from the tokens on;
- own: the learner went on from the engine's values at every point before, so that only this one's
  arithmetic differs;
- enters: KL(engine, learner) once everything before the point is the engine's, less once the point
  is too. These add
  up to the whole (docs/one_arithmetic.md).

N response tokens, S positions, H any width, V tokens of the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_rl.batch import Batch
from megatron_rl.learner.activations import Activations
from megatron_rl.learner.learner import Learner
from megatron_rl.models.points import Kind, Pair, Point, points

LOGITS = Point(Kind.lm_head)
LOGPROB = Point(Kind.logprob)


@dataclass
class Difference:
    """Differences of the values of one point, over all sequences."""

    total: float = 0.0
    count: int = 0
    max: float = 0.0

    @property
    def mean(self) -> float:
        return self.total / max(1, self.count)

    def add(self, difference: Tensor) -> None:
        sizes = difference.double().abs()
        self.total, self.count = self.total + float(sizes.sum()), self.count + sizes.numel()
        self.max = max(self.max, float(sizes.max()))


@dataclass
class Found:
    """Findings at one point."""

    apart: Difference = field(default_factory=Difference)
    own: Difference = field(default_factory=Difference)
    kl: float = 0.0  # summed over tokens, once everything up to this point is the engine's


@dataclass
class Walk:
    """A walk through the forward passes of one learner beside those of one engine."""

    learner: Learner
    tokens: int = 0
    kl: float = 0.0  # of the two as they are, summed over tokens
    signed: float = 0.0  # learner's logprob less the engine's, summed over tokens

    def __post_init__(self) -> None:
        self._activations = Activations(self.learner)
        self.points = {point: Found() for point in points(self.learner.shape)}

    def add(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """`batch`: one row; `values`: the engine's, of all its tokens."""
        engine_N = values[str(LOGPROB)][int(batch.prompt_lengths_B[0]) - 1 :, 0]
        for replace in (False, True):
            with self._activations.beside(values, replace) as seen:
                logprobs_N = self.learner.logprobs(batch)[0, : len(engine_N)]
            side = {
                point: found.own if replace else found.apart for point, found in self.points.items()
            }
            for point, pairs in seen.items():
                for pair in pairs:
                    side[point].add(pair.learner_SH.double() - pair.engine_SH.double())
            side[LOGPROB].add(logprobs_N - engine_N)
            if not replace:
                self.tokens += len(engine_N)
                self.kl += kl(seen[LOGITS])
                self.signed += float((logprobs_N.double() - engine_N).sum())
        self._go_over(batch, values)

    def _go_over(self, batch: Batch, values: Mapping[str, Tensor]) -> None:
        """Point by point, from the learner's values to the engine's. What is the engine's need not
        be computed.
        """
        try:
            for point, found in self.points.items():
                if point == LOGITS:
                    return  # from here on both have one distribution
                self._activations.hold(point)
                with self._activations.beside(values, only=LOGITS) as seen:
                    self.learner.logprobs(batch)
                found.kl += kl(seen[LOGITS])
        finally:
            self._activations.release()

    def entered(self) -> dict[Point, float]:
        """The KL per token that enters at each point; the sum is that of the two as they are."""
        before = self.kl
        entered = {}
        for point, found in self.points.items():
            entered[point] = (before - found.kl) / max(1, self.tokens)
            before = found.kl
        return entered


def kl(logits: Sequence[Pair]) -> float:
    """KL(engine, learner) at temperature 1, summed over positions."""
    (pair,) = logits
    total = 0.0
    for learner_NV, engine_NV in zip(
        pair.learner_SH.split(64), pair.engine_SH.split(64), strict=True
    ):
        ours, theirs = (logits_NV.double().log_softmax(1) for logits_NV in (learner_NV, engine_NV))
        total += float((theirs.exp() * (theirs - ours)).sum())
    return total
