"""lanes.jsonl: who was at work when, a line for each step. The sampler's part of a step may lie in the time of others.

A span is [lane, begin, end] in seconds since 1970; the learner's lanes are the phases of the loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import NamedTuple

GAP_S = 0.02  # what is closer together is one span


class Span(NamedTuple):
    lane: str
    begin: float  # of time.perf_counter
    end: float


def encode_spans(step: int, spans: Iterable[Span]) -> str:
    since = time.time() - time.perf_counter()
    told = [[lane, round(since + begin, 3), round(since + end, 3)] for lane, begin, end in _merged(spans)]
    return json.dumps({"step": step, "spans": told})


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
