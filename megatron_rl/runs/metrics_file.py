"""metrics.jsonl: one line of strict JSON per step, written and read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO


def encode_line(metrics: Mapping[str, float]) -> str:
    """NaN and infinities become null, and "non_finite" says which was which."""
    odd = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
    line: dict[str, Any] = {name: None if name in odd else value for name, value in metrics.items()}
    if odd:
        line["non_finite"] = odd
    return json.dumps(line, sort_keys=True, allow_nan=False)


def decode_line(text: str) -> dict[str, float]:
    line = json.loads(text)
    odd = line.pop("non_finite", {})
    return {name: float(odd[name]) if name in odd else value for name, value in line.items()}


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One line per step: of a step that a resumed run did again, the latest counts. Torn lines are skipped."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[dict[str, float]], int]:
    """The lines of `read_metrics`, and how many more there are that cannot be read."""
    by_step: dict[int, dict[str, float]] = {}
    torn = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            line = _numbers(text)
            if "progress/step" in line:
                by_step[int(line["progress/step"])] = line
            else:
                torn += 1
    return [by_step[step] for step in sorted(by_step)], torn


def _numbers(text: str) -> dict[str, float]:
    """What is a number in a line; nothing of one that is torn, or does not say its step."""
    try:
        line = {name: value for name, value in decode_line(text).items() if type(value) in (int, float)}
        all(map(math.isfinite, line.values()))  # whole numbers may be too large for one with a point
        int(line["progress/step"])
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return {}
    return line


def append_to(path: Path) -> TextIO:
    """Opens for appending after the last whole line: a killed run may have left half of one."""
    torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
    file = path.open("a", encoding="utf-8")
    if torn:
        file.write("\n")
    return file
