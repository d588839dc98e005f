"""Which alarms stand, from the metrics of step after step. The rules are in `alarm_rules.py`.

An alarm is raised when its value has been beyond its bound for some steps in a row, and cleared when it has been well
inside for as many: a value that wavers around the bound raises it once. A step that does not measure it counts as none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.alarms import Alarm, Setting, setting
from megatron_rl.config.schema import Format
from megatron_rl.runs.alarm_rules import HISTORY, RULES, WINDOW, Line, Rule


def bound_of(rule: Rule, given: Setting, formats: Sequence[Format]) -> float:
    if given.bound is not None:
        return given.bound
    return max(rule.bound[one] for one in formats) if isinstance(rule.bound, Mapping) else rule.bound


def clear_at(bound: float, below: bool) -> float:
    """Well inside: a fifth away from the bound, and for shares at most half of the way to 1."""
    if not below:
        return 0.8 * bound
    return min(bound / 0.8, (bound + 1) / 2) if bound <= 1 else bound / 0.8


@dataclass(frozen=True)
class News:
    alarm: Alarm
    raised: bool  # else cleared
    stops: bool
    step: int
    value: float
    bound: float

    @property
    def what(self) -> str:
        rule = RULES[self.alarm]
        side = "below" if rule.below else "above"
        steps = f"{rule.steps} step{'s' * (rule.steps > 1)}"
        about = f"{side} {self.bound:g} for {steps}" if self.raised else "cleared"
        return f"{self.alarm}: {self.told}, {about}"

    @property
    def told(self) -> str:
        """In as many digits as tell the value from its bound."""
        several = (f"{self.value:.{digits}g}" for digits in range(3, 17))
        return next((one for one in several if float(one) != self.bound), f"{self.value:g}")

    def __str__(self) -> str:
        return f"{self.what}. {RULES[self.alarm].action}" if self.raised else self.what


@dataclass
class _Watch:
    rule: Rule
    stops: bool
    bound: float
    standing: bool = False
    in_a_row: int = 0

    def after(self, value: float) -> bool:
        """Whether the alarm has been raised or cleared by this value. One that is no number is beyond every bound."""
        limit = clear_at(self.bound, self.rule.below) if self.standing else self.bound
        inside = value >= limit if self.rule.below else value <= limit
        self.in_a_row = self.in_a_row + 1 if inside == self.standing else 0
        if self.in_a_row < self.rule.steps:
            return False
        self.standing, self.in_a_row = not self.standing, 0
        return True


@dataclass
class Alarms:
    """Of one attempt: one that goes on with a run counts from its own first step."""

    given: Mapping[str, Any] = field(default_factory=dict)  # log.alarms
    formats: Sequence[Format] = (Format.none,)
    sampled: bool = True  # by a sampler; else the answers are the data set's own
    standing: dict[str, dict[str, Any]] = field(default_factory=dict)  # for status.json
    stop: str | None = None  # why the run is to end

    def __post_init__(self) -> None:
        self._before: deque[Line] = deque(maxlen=WINDOW)
        settings = {alarm: setting(self.given.get(alarm, "warn")) or Setting() for alarm in RULES}
        self._watches = [
            _Watch(rule, settings[alarm].stops, bound_of(rule, settings[alarm], self.formats))
            for alarm, rule in RULES.items()
            if settings[alarm].on and (self.sampled or rule.always)
        ]

    def after(self, line: Line) -> list[News]:
        """What a step's metrics have raised and cleared."""
        news = []
        for watch in self._watches:
            value = watch.rule.value(line, self._before)
            if value is None or not watch.after(value):
                continue
            step, alarm = int(line["progress/step"]), watch.rule.alarm
            one = News(alarm, watch.standing, watch.stops, step, value, watch.bound)
            news.append(one)
            if one.raised:
                self.standing[alarm] = {"step": step, "value": one.told, "bound": watch.bound}
                self.stop = self.stop or (f"alarm {one.what}" if watch.stops else None)
            else:
                del self.standing[alarm]
        self._before.append({name: line[name] for name in HISTORY if name in line})
        return news
