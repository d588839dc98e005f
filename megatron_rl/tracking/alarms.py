"""Alarms: table of metrics, bounds and advice, and the state of each alarm, updated every step.

An alarm is raised after some steps in a row beyond its bound, and cleared after as many well
inside. Steps without the metric are ignored.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.choices import Alarm, AlarmSetting, alarm_setting
from megatron_rl.config.schema import Format
from megatron_rl.tracking.metrics import accuracies
from megatron_rl.tracking.metrics_file import MISMATCH

Line = Mapping[str, float]
WINDOW = 50  # earlier steps that a median is taken over ...
FULL = 20  # ... once there are so many of them
CLEARLY = 4.0  # standard errors of a difference
LENGTH = "rollout/response_tokens_mean"
GATES = dict.fromkeys(Format, 0.02) | {
    Format.none: 0.005,
    Format.int4: 0.2,
}  # of the mismatch, in nats
Bound = float | Mapping[Format, float]


@dataclass(frozen=True)
class Point:
    """An accuracy, and its standard error."""

    value: float
    error: float

    def share_of(self, other: "Point") -> float:
        """Ratio to another accuracy; 1 unless it is significantly lower."""
        if other.value - self.value > CLEARLY * math.hypot(self.error, other.error):
            return self.value / other.value
        return 1.0


@dataclass
class Past:
    """Earlier steps of a run: accuracies of all attempts, lengths of the present one."""

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


# value of a step, given earlier ones; None: not measured
Value = Callable[[Line, Past], float | None]


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
    """Return the accuracy relative to its reference, of the set with the largest drop."""
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
    """Return the mean response length relative to its median over earlier steps."""
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
    """Return the share of tokens without a finite logprob or of skipped updates, whichever is
    larger.
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


@dataclass(frozen=True)
class Rule:
    looks_at: str
    action: str
    value: Value
    bound: Bound
    steps: int
    below: bool = False  # raised below the bound; else above
    always: bool = False  # also for supervised runs


RULES = {
    Alarm.mismatch: Rule(
        f"`{MISMATCH}`: mismatch of sampler and learner",
        "Check the sync first: sync/probe_abs_diff against its budget. Then the format: keep the "
        "worst layers in BF16 (quantization.ignore), compare with quantization.format=none. If "
        "rollout/staleness_mean is above 0, lower rollout.max_staleness or sync.every. Until then "
        "correction=icepop masks the worst tokens.",
        metric(MISMATCH),
        GATES,
        steps=5,
    ),
    Alarm.probe: Rule(
        "`sync/probe_abs_diff` over `sync/probe_budget`: right after a sync",
        "Sampler and learner differ by more than the format explains for activations without "
        "outliers, and by less than a wrong matrix would cause. `megatron-rl mismatch` on the "
        "model locates it; against outliers use quantization.smoothing=0.5 (INT8), "
        "quantization.ignore or quantization=fp8. A wrong temperature or old weights look alike.",
        share("sync/probe_abs_diff", "sync/probe_budget"),
        1.0,
        steps=1,
    ),
    Alarm.ess: Rule(
        "`rollout_corr/rollout_is_eff_sample_size`: of the applied weights",
        "A few tokens dominate the gradient. Lower correction.weight.high, or set correction.weight.target_ess.",
        metric("rollout_corr/rollout_is_eff_sample_size"),
        0.5,
        steps=5,
        below=True,
    ),
    Alarm.non_finite: Rule(
        "share of tokens without a finite logprob or of skipped updates, the larger",
        "Tokens: suspect the engine's kernels or scales, compare with quantization.format=none. "
        "Updates: lower optim.lr; `megatron-rl rerun-step` repeats a dumped one (skip_and_dump).",
        not_finite,
        0.01,
        steps=3,
        always=True,
    ),
    Alarm.entropy: Rule(
        "`loss/entropy`, in nats",
        "The policy has stopped exploring. Raise loss.clip_high, loss.entropy_coef or "
        "loss.kl_coef, lower optim.lr, or use loss.name=clip_cov.",
        metric("loss/entropy"),
        0.01,
        steps=10,
        below=True,
    ),
    Alarm.reward_errors: Rule(
        "`reward/errors` over `rollout/n`: responses without a score",
        "Rewards fail or time out, more often for hard prompts. Raise reward.timeout_s or "
        "reward.workers; output of the functions in reward.name is in the log of rank 0.",
        share("reward/errors", "rollout/n"),
        0.05,
        steps=3,
    ),
    Alarm.truncated: Rule(
        "`rollout/truncated_fraction`: responses cut at the length limit",
        "Raise rollout.max_response_tokens; reward.overlong_buffer penalizes long responses, "
        "reward.overlong_filter masks truncated ones.",
        metric("rollout/truncated_fraction"),
        0.5,
        steps=5,
    ),
    Alarm.length: Rule(
        f"`{LENGTH}` over its median of the last {WINDOW} steps",
        "Responses grow fast. Read some in the report: if they repeat themselves or pad for the "
        "reward, change the reward, lower optim.lr or set reward.overlong_buffer.",
        length_growth,
        2.0,
        steps=5,
    ),
    Alarm.accuracy: Rule(
        "held-out accuracy over the higher of its first and half its best; 1 unless lower by 4 standard errors",
        "The policy gets worse: lower optim.lr first, then check mismatch, loss/entropy and "
        "reward/no_answer. Resume from an earlier checkpoint (checkpoint.best=eval/accuracy).",
        lost_accuracy,
        1.0,
        steps=1,
        below=True,
        always=True,
    ),
    Alarm.failed_saves: Rule(
        "`progress/failed_saves`: checkpoints in a row that were not saved",
        "If the run ends now, all steps since its newest checkpoint are lost. driver.log has the "
        "reason of each failure: free space in run.root, or lower checkpoint.keep_last.",
        metric("progress/failed_saves"),
        2.0,
        steps=1,
        always=True,
    ),
}


def bound_of(rule: Rule, given: AlarmSetting, formats: Sequence[Format]) -> float:
    if given.bound is not None:
        return given.bound
    if isinstance(rule.bound, Mapping):
        return max(rule.bound[one] for one in formats)
    return rule.bound


def clear_at(bound: float, below: bool) -> float:
    """Value that clears an active alarm: a fifth away from its bound; for shares at most half of
    the way to 1.
    """
    if not below:
        return 0.8 * bound
    if bound <= 1:
        return min(bound / 0.8, (bound + 1) / 2)
    return bound / 0.8


@dataclass(frozen=True)
class AlarmEvent:
    """Notice that an alarm was raised or cleared."""

    alarm: Alarm
    raised: bool  # else cleared
    stops: bool
    step: int
    value: float
    bound: float

    @property
    def what(self) -> str:
        if not self.raised:
            return f"{self.alarm}: {self.description}, cleared"
        rule = RULES[self.alarm]
        side = "below" if rule.below else "above"
        steps = f"{rule.steps} step{'s' * (rule.steps > 1)}"
        return f"{self.alarm}: {self.description}, {side} {self.bound:g} for {steps}"

    @property
    def description(self) -> str:
        """The value, with enough digits to differ from its bound."""
        several = (f"{self.value:.{digits}g}" for digits in range(3, 17))
        return next((one for one in several if float(one) != self.bound), f"{self.value:g}")

    def __str__(self) -> str:
        if self.raised:
            return f"{self.what}. {RULES[self.alarm].action}"
        return self.what


@dataclass
class _Watch:
    alarm: Alarm
    rule: Rule
    stops: bool
    bound: float
    active: bool = False
    in_a_row: int = 0

    def after(self, value: float) -> bool:
        """True if this value raises or clears the alarm. NaN is beyond every bound."""
        limit = self.bound
        if self.active:
            limit = clear_at(self.bound, self.rule.below)
        inside = value >= limit if self.rule.below else value <= limit
        self.in_a_row = self.in_a_row + 1 if inside == self.active else 0
        if self.in_a_row < self.rule.steps:
            return False
        self.active = not self.active
        self.in_a_row = 0
        return True


@dataclass
class Alarms:
    """The alarms of one attempt, which counts from its own first step."""

    given: Mapping[str, Any] = field(default_factory=dict)  # log.alarms
    formats: Sequence[Format] = (Format.none,)
    sampled: bool = True  # False for supervised runs
    active: dict[str, dict[str, Any]] = field(default_factory=dict)  # for status.json
    stop: str | None = None  # why the run is to end

    def __post_init__(self) -> None:
        self.past = Past()
        self._watches = []
        for alarm, rule in RULES.items():
            setting = alarm_setting(self.given.get(alarm, "warn")) or AlarmSetting()
            if setting.on and (self.sampled or rule.always):
                bound = bound_of(rule, setting, self.formats)
                self._watches.append(_Watch(alarm, rule, setting.stops, bound))

    def restore(self, lines: Iterable[Line], step: int) -> None:
        """Load the accuracies of earlier attempts, up to the step after which this one resumes."""
        for line in lines:
            if line["progress/step"] <= step:
                self.past.add_accuracies(line)

    def summaries(self) -> list[str]:
        return [
            f"{alarm} since step {about['step']} ({about['value']})"
            for alarm, about in self.active.items()
        ]

    def after(self, line: Line) -> list[AlarmEvent]:
        """Update with a step's metrics; return the alarms raised and cleared."""
        news = []
        for watch in self._watches:
            value = watch.rule.value(line, self.past)
            if value is None or not watch.after(value):
                continue
            step = int(line["progress/step"])
            alarm = watch.alarm
            one = AlarmEvent(alarm, watch.active, watch.stops, step, value, watch.bound)
            news.append(one)
            if one.raised:
                self.active[alarm] = {"step": step, "value": one.description, "bound": watch.bound}
                self.stop = self.stop or (f"alarm {one.what}" if watch.stops else None)
            else:
                del self.active[alarm]
        self.past.add(line)
        return news
