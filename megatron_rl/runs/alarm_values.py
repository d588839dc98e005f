"""Values that alarms compare with bounds: functions of a step's metrics and of `Past`, what is kept of steps before."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megatron_rl.config.schema import Format
from megatron_rl.runs.metrics import accuracies

Line = Mapping[str, float]
WINDOW = 50  # earlier steps that a median is taken over ...
FULL = 20  # ... once there are so many of them
BLOCK = 10  # steps whose mean reward is compared
CLEARLY = 3.0  # standard errors of a difference
CHOSEN = 4.0  # the same where the best of many is compared
K3, GRAD_NORM = "rollout_corr/k3_kl", "optim/grad_norm"
REWARD, SPREAD = "reward/sampler_mean", "reward/std"
HISTORY = (K3, GRAD_NORM, REWARD, SPREAD)  # what earlier steps are asked for


@dataclass(frozen=True)
class Point:
    """An accuracy, and its standard error."""

    value: float
    error: float

    def share_of(self, other: Point, clear: float) -> float:
        """Over another one; 1 where it is not below it by so many standard errors."""
        clearly = other.value - self.value > clear * math.hypot(self.error, other.error)
        return self.value / other.value if clearly else 1.0


@dataclass
class Past:
    """What a run has had so far. Accuracies are those of all attempts, the rest is that of the present one."""

    recent: deque[Line] = field(default_factory=lambda: deque(maxlen=WINDOW))
    first: dict[str, Point] = field(default_factory=dict)  # accuracy of each set
    best: dict[str, Point] = field(default_factory=dict)
    best_reward: float = -math.inf  # mean of a block that ended a block ago, or before
    most_clipped: float = 0.0

    def add(self, line: Line) -> None:
        self.add_accuracies(line)
        self.recent.append({name: line[name] for name in HISTORY if name in line})
        rewards = self.rewards()
        if len(rewards) >= 2 * BLOCK:
            self.best_reward = max(self.best_reward, statistics.fmean(rewards[-2 * BLOCK : -BLOCK]))
        self.most_clipped = max(self.most_clipped, clipped(line, self) or 0.0)

    def add_accuracies(self, line: Line) -> None:
        for name, point in points(line).items():
            self.first.setdefault(name, point)
            self.best[name] = max(self.best.get(name, point), point, key=lambda one: one.value)

    def rewards(self) -> list[float]:
        return [line[REWARD] for line in self.recent if math.isfinite(line.get(REWARD, math.nan))]


Value = Callable[[Line, Past], float | None]  # of a step, given those before; None: not measured


def points(line: Line) -> dict[str, Point]:
    """The accuracy of each set that was evaluated. Its error is that of coins at least, which is above 0 at 0 and 1."""
    found = {}
    for name in accuracies(line):
        value, n = line[name], line.get(f"{name.removesuffix('accuracy')}n", 0.0)
        if math.isfinite(value) and n > 0:
            rate = (value * n + 2.0) / (n + 4.0)  # Agresti and Coull
            coins = math.sqrt(max(rate * (1.0 - rate), 0.0) / n)
            found[name] = Point(value, max(line.get(f"{name}_stderr", 0.0), coins))
    return found


def accuracy_over(earlier: Callable[[Past], Mapping[str, Point]], clear: float) -> Value:
    """The accuracy over an earlier one, of the set where it has fallen most."""

    def value(line: Line, past: Past) -> float | None:
        known = earlier(past)
        shares = (one.share_of(known[name], clear) for name, one in points(line).items() if name in known)
        return min(shares, default=None)

    return value


def reward_fall(line: Line, past: Past) -> float | None:
    """How far the mean reward of a block lies below the best of those before, in deviations of an answer's reward."""
    rewards = [*past.rewards(), line.get(REWARD, math.nan)]
    spreads = [one[SPREAD] for one in past.recent if one.get(SPREAD, 0.0) > 0]
    if not (math.isfinite(rewards[-1]) and math.isfinite(past.best_reward) and spreads):
        return None
    fall = past.best_reward - statistics.fmean(rewards[-BLOCK:])
    # differences of neighbours, which know of no trend
    steps = [(b - a) ** 2 / 2.0 for a, b in itertools.pairwise(rewards)]
    noise = math.sqrt(2.0 / BLOCK * statistics.fmean(steps))
    return fall / statistics.median(spreads) if fall > CHOSEN * noise else 0.0


def clipped(line: Line, _: Past) -> float | None:
    """Share of tokens that a clip acts on, of the updates after a step's first, which is where the anchor is."""
    updates = line.get("optim/updates", 0.0)
    share = sum(line.get(f"loss/clip_fraction_{side}", 0.0) for side in ("high", "low"))
    return share * updates / (updates - 1.0) if updates > 1 and "loss/clip_fraction_high" in line else None


def most_clipped(line: Line, past: Past) -> float | None:
    now = clipped(line, past)
    return None if now is None else max(now, past.most_clipped)


def metric(name: str) -> Value:
    return lambda line, _: line.get(name)


def over_median(name: str) -> Value:
    """The metric over the median of the steps before."""

    def value(line: Line, past: Past) -> float | None:
        earlier = [one[name] for one in past.recent if math.isfinite(one.get(name, math.nan))]
        usual = statistics.median(earlier) if len(earlier) >= FULL else 0.0
        return line[name] / usual if usual > 0 and name in line else None

    return value


def over_bf16(line: Line, _: Past) -> float | None:
    """The worst format's mismatch over that of a fleet's BF16 servers, which is not the formats' fault."""
    floor = line.get(f"rollout_corr/{Format.none}/k3_kl", 0.0)
    others = [line[name] for one in Format if one != Format.none and (name := f"rollout_corr/{one}/k3_kl") in line]
    return max(others) / floor if others and floor > 0 else None


def share(parts: Iterable[str], whole: str) -> Value:
    def value(line: Line, _: Past) -> float | None:
        found = [line[name] for name in parts if name in line]
        return sum(found) / line[whole] if found and line.get(whole) else None

    return value


def not_finite(line: Line, past: Past) -> float | None:
    """The larger of two shares: of tokens without a finite logprob, and of updates that were skipped."""
    tokens = share(("rollout_corr/non_finite_sampler", "rollout_corr/non_finite_learner"), "rollout/tokens")
    skipped, made = line.get("optim/skipped"), line.get("optim/updates", 0.0)
    updates = skipped / (skipped + made) if skipped is not None and skipped + made else None
    return max((one for one in (tokens(line, past), updates) if one is not None), default=None)


def sampler_loss(line: Line, _: Past) -> float | None:
    """By how many standard errors the sampler's gain is below 0, of an update by which the learner has gained."""
    gain, error, own = (line.get(f"update/{name}") for name in ("sampler_gain", "sampler_gain_stderr", "learner_gain"))
    if gain is None or error is None or own is None:
        return None
    return -gain / error if own > 0 and error > 0 else 0.0
