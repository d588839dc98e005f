"""lanes.jsonl: who was at work when, a line for each step. The sampler's part of a step may lie in the time of others.

A span is [lane, begin, end] in seconds since 1970; the learner's lanes are the phases of the loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

GAP_S = 0.02  # what is closer together is one span
# row of a chart -> the lanes that stand in it; the learner's rollout phase is its wait for answers
ROWS = {
    "sampler": ("sampler",),
    "rewards": ("rewards",),
    "learner": ("rollout", "prox", "correction", "update", "record", "checkpoint"),
    "sync, eval": ("sync", "eval"),
}
SHOWN = 6  # steps of a chart


class Span(NamedTuple):
    lane: str
    begin: float  # of time.perf_counter
    end: float


def encode_spans(step: int, spans: Iterable[Span]) -> str:
    since = time.time() - time.perf_counter()
    told = [[lane, round(since + begin, 3), round(since + end, 3)] for lane, begin, end in _merged(spans)]
    return json.dumps({"step": step, "spans": told})


class Lane(NamedTuple):
    """A span of a chart: seconds since the chart's beginning."""

    row: str
    lane: str
    step: int
    begin: float
    end: float


def read_lanes(path: Path, steps: int = SHOWN) -> list[Lane]:
    """Some consecutive steps of the middle of a run: early ones hold what happens once. Empty for old runs."""
    if not path.is_file():
        return []
    lines = {line["step"]: line["spans"] for line in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    numbers = sorted(step for step in lines if step > 0)
    first = max(0, len(numbers) // 2 - steps // 2)
    chosen = set(numbers[first : first + steps])
    window = [(begin, end) for step in chosen for lane, begin, end in lines[step] if lane in ROWS["learner"]]
    if not window:
        return []
    start, stop = min(begin for begin, _ in window), max(end for _, end in window)
    row_of = {lane: row for row, lanes in ROWS.items() for lane in lanes}
    return [
        Lane(row_of[lane], lane, step, max(begin, start) - start, min(end, stop) - start)
        for step, spans in sorted(lines.items())
        for lane, begin, end in spans
        if lane in row_of and end > start and begin < stop
    ]


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
