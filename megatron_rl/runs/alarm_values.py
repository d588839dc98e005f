"""Values that alarms compare with bounds: functions of a step's metrics and of `Past`, what is kept
of steps before.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megatron_rl.runs.metrics import accuracies

Line = Mapping[str, float]
WINDOW = 50  # earlier steps that a median is taken over ...
FULL = 20  # ... once there are so many of them
CLEARLY = 4.0  # standard errors of a difference
K3 = "rollout_corr/k3_kl"
LENGTH = "rollout/response_tokens_mean"


@dataclass(frozen=True)
class Point:
    """An accuracy, and its standard error."""

    value: float
    error: float

    def share_of(self, other: Point) -> float:
        """Over another one; 1 where it is not clearly below it."""
        clearly = other.value - self.value > CLEARLY * math.hypot(self.error, other.error)
        if clearly:
            return self.value / other.value
        return 1.0


@dataclass
class Past:
    """What a run has had so far. Accuracies are those of all attempts, the rest is that of the
    present one.
    """

    # lengths of responses
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: dict[str, Point] = field(default_factory=dict)  # accuracy of each set
    best: dict[str, Point] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        self.add_accuracies(line)
        if math.isfinite(line.get(LENGTH, math.nan)):
            self.recent.append(line[LENGTH])

    def add_accuracies(self, line: Line) -> None:
        for name, point in points(line).items():
            self.first.setdefault(name, point)
            self.best[name] = max(self.best.get(name, point), point, key=lambda one: one.value)


Value = Callable[[Line, Past], float | None]  # of a step, given those before; None: not measured


def points(line: Line) -> dict[str, Point]:
    """The accuracy of each set that was evaluated. Its error is that of coins at least, which is
    above 0 at 0 and 1.
    """
    found = {}
    for name in accuracies(line):
        value = line[name]
        n = line.get(f"{name.removesuffix('accuracy')}n", 0.0)
        if math.isfinite(value) and n > 0:
            rate = (value * n + 2.0) / (n + 4.0)  # Agresti and Coull
            coins = math.sqrt(max(rate * (1.0 - rate), 0.0) / n)
            found[name] = Point(value, max(line.get(f"{name}_stderr", 0.0), coins))
    return found


def lost_accuracy(line: Line, past: Past) -> float | None:
    """The accuracy over what it has to hold, of the set where it has fallen most."""
    shares = []
    for name, point in points(line).items():
        if name in past.first:
            first = past.first[name]
            best = past.best[name]
            shares += [point.share_of(first), point.share_of(Point(best.value / 2, best.error / 2))]
    return min(shares, default=None)


def metric(name: str) -> Value:
    return lambda line, _: line.get(name)


def length_growth(line: Line, past: Past) -> float | None:
    """The mean length of responses over its median in the steps before."""
    if len(past.recent) < FULL or LENGTH not in line:
        return None
    return line[LENGTH] / max(statistics.median(past.recent), 1.0)


def share(part: str, whole: str) -> Value:
    def value(line: Line, _: Past) -> float | None:
        if part in line and line.get(whole):
            return line[part] / line[whole]
        return None

    return value


def not_finite(line: Line, past: Past) -> float | None:
    """The larger of two shares: of tokens without a finite logprob, and of updates that were
    skipped.
    """
    shares = []
    sides = [f"rollout_corr/non_finite_{side}" for side in ("sampler", "learner")]
    if line.get("rollout/tokens") and any(side in line for side in sides):
        shares.append(sum(line.get(side, 0.0) for side in sides) / line["rollout/tokens"])
    skipped = line.get("optim/skipped", 0.0)
    made = line.get("optim/updates", 0.0)
    if "optim/skipped" in line and skipped + made:
        shares.append(skipped / (skipped + made))
    return max(shares, default=None)
