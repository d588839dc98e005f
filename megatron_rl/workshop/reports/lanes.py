"""lanes.jsonl read for a chart: who was at work when, in a few steps of a run (runs/timeline.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

# row of a chart -> the lanes that stand in it; the learner's rollout phase is its wait for answers
ROWS = {
    "sampler": ("sampler",),
    "rewards": ("rewards",),
    "learner": ("rollout", "prox", "correction", "update", "record", "checkpoint"),
    "sync, eval": ("sync", "eval"),
}
SHOWN = 6  # steps of a chart


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
