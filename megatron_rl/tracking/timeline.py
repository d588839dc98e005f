"""Clock of a step: time by phase, estimated remaining time, rates, and the lines of timeline.jsonl.

In timeline.jsonl a span of work is [lane, begin, end] in seconds since 1970; in memory, times are
those of the clock time.perf_counter.
"""

import json
import math
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

GAP_S = 0.02  # spans closer than this are merged
# that say how long the next one takes; among them one with an evaluation, where that is frequent
RECENT_STEPS = 8
# a step without it was only the start of a run, or the end of a step that was begun before
WHOLE = "update"


class Span(NamedTuple):
    lane: str
    begin: float  # of time.perf_counter
    end: float


class PhaseClock:
    """Clock that splits a step by phase. Nested phases are not counted twice."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[tuple[str, float]] = []  # phases, and when they began
        self.spans: list[Span] = []  # of completed phases, until they are collected
        self._begun = self._since = time.perf_counter()
        self._recent: deque[dict[str, float]] = deque(maxlen=RECENT_STEPS)

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append((name, self._since))

    def leave(self) -> str | None:
        """Leave the current phase; return the enclosing one, if any."""
        self._charge()
        self.spans.append(Span(*self._open.pop(), self._since))
        return self.phase

    @property
    def phase(self) -> str | None:
        return self._open[-1][0] if self._open else None

    def finish_step(self) -> dict[str, float]:
        self._charge()
        whole = self._since - self._begun
        claimed = math.fsum(self._seconds.values())
        split = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        if WHOLE in self._seconds:
            self._recent.append(self._seconds)
        self._seconds = {}
        self._begun = self._since
        return {**split, "time/step": whole, "time/other": max(0.0, whole - claimed)}

    def rest(self, after: bool = False) -> float:
        """Seconds that the step, or what follows the present phase (`after`), will still take, by
        the longest of recent steps. Infinite before one was measured. Any thread may ask.
        """
        if not self._recent:
            return math.inf
        now = self.phase
        spent = dict(self._seconds)
        if now is not None:
            spent[now] = spent.get(now, 0.0) + time.perf_counter() - self._since
        rest = 0.0
        for name in {name for step in self._recent for name in step}:
            longest = max(step.get(name, 0.0) for step in self._recent)
            if name == now and not after:
                rest += max(0.0, longest - spent[name])
            elif name not in spent:
                rest += longest
        return rest

    def _charge(self) -> None:
        now = time.perf_counter()
        if name := self.phase:
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def throughput(line: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of a step."""
    found = {}
    if line["time/step"] > 0 and "time/sync" in line:
        found["perf/sync_fraction"] = line["time/sync"] / line["time/step"]
    seconds = line.get("rollout/seconds", line.get("time/rollout", 0.0))
    if "rollout/tokens" in line and seconds > 0:
        found["perf/rollout_tokens_per_s"] = line["rollout/tokens"] / seconds
    return found


def encode_spans(step: int, spans: Iterable[Span]) -> str:
    since = time.time() - time.perf_counter()
    rounded = [
        [lane, round(since + begin, 3), round(since + end, 3)]
        for lane, begin, end in _merged(spans)
    ]
    return json.dumps({"step": step, "spans": rounded})


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    newest: dict[str, int] = {}
    for one in sorted(spans, key=lambda span: span.begin):
        at = newest.get(one.lane)
        if at is not None and one.begin - found[at].end < GAP_S:
            found[at] = found[at]._replace(end=max(one.end, found[at].end))
        else:
            newest[one.lane] = len(found)
            found.append(one)
    return found
