"""metrics.jsonl (strict JSON, a line per step): combines parts, encodes and reads lines, sums a run
up in numbers.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.files import open_regular
from megatron_rl.tracking.metrics import ACCURACY, row
from megatron_rl.types import Metrics

MISMATCH = "rollout_corr/k3_kl"
SAMPLE_SIZE = "rollout_corr/rollout_is_eff_sample_size"
AREA = "accuracy_area"
IN_BF16 = "accuracy_bf16"
REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": np.mean,
    "sum": np.sum,
    "min": np.min,
    "max": np.max,
    "last": lambda values: values[-1],
}


def combine(parts: Sequence[Metrics]) -> Metrics:
    """Combine the parts of a step by each name's reducer; an unknown name is averaged."""
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    reducers = {name: found.reducer if (found := row(name)) else "mean" for name in values}
    return as_numbers({name: REDUCERS[reducers[name]](v) for name, v in values.items()})


def as_numbers(metrics: Mapping[str, Any]) -> Metrics:
    """Numbers as JSON has them, also of one-element tensors and NumPy scalars."""
    return {
        name: int(value) if isinstance(value, int | np.integer) else float(value)
        for name, value in metrics.items()
    }


def encode_line(metrics: Metrics) -> str:
    """Encode a line: NaN and infinities become null, listed under "non_finite"."""
    odd = {name: str(value) for name, value in metrics.items() if not math.isfinite(value)}
    line: dict[str, Any] = {name: None if name in odd else value for name, value in metrics.items()}
    if odd:
        line["non_finite"] = odd
    return json.dumps(line, sort_keys=True, allow_nan=False)


def decode_line(text: str) -> Metrics:
    line = json.loads(text)
    odd = line.pop("non_finite", {})
    return {name: float(odd[name]) if name in odd else value for name, value in line.items()}


def read_metrics(path: Path) -> list[Metrics]:
    """Read one line per step, the latest of a repeated step. Incomplete lines are skipped."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Metrics], int]:
    """Return the lines of `read_metrics` and the number of unreadable lines."""
    by_step: dict[int, Metrics] = {}
    unreadable = 0
    with open_regular(path) as file:
        for text in file:
            line = _numbers(text.decode(errors="replace"))
            if "progress/step" in line:
                by_step[int(line["progress/step"])] = line
            else:
                unreadable += 1
    return [by_step[step] for step in sorted(by_step)], unreadable


def _numbers(text: str) -> Metrics:
    """Numbers of a line; empty if it is incomplete or has no step."""
    try:
        line = {
            name: value for name, value in decode_line(text).items() if type(value) in (int, float)
        }
        # whole numbers may be too large for one with a point
        all(map(math.isfinite, line.values()))
        int(line["progress/step"])
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return {}
    return line


@dataclass(frozen=True)
class Series:
    steps: list[int]
    values: list[float]

    def __bool__(self) -> bool:
        return any(map(math.isfinite, self.values))

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class Curves:
    """A run's lines of metrics, one per step, in order."""

    lines: tuple[Metrics, ...]

    def series(self, name: str, first_step: int = 0) -> Series:
        found = [
            (int(line["progress/step"]), float(line[name]))
            for line in self.lines
            if name in line and line["progress/step"] >= first_step
        ]
        return Series([step for step, _ in found], [value for _, value in found])

    def last(self, name: str) -> float | None:
        values = self.series(name).finite
        return values[-1] if values else None

    def median(self, name: str) -> float | None:
        values = self.series(name, first_step=1).finite
        if values:
            return statistics.median(values)
        return None

    def mean(self, name: str) -> float | None:
        values = self.series(name, first_step=1).finite
        if values:
            return statistics.fmean(values)
        return None

    def total(self, name: str, first_step: int = 0) -> float:
        return math.fsum(self.series(name, first_step).finite)


@dataclass(frozen=True)
class Number:
    """A summary number of a run."""

    title: str
    form: str
    about: str
    metric: str
    of: Callable[[Curves, str], float | None] = Curves.median


def area(curve: Series) -> float | None:
    """Under the curve, over its steps: the mean height. None of fewer than two points."""
    finite = np.isfinite(curve.values)
    steps = np.array(curve.steps)[finite]
    if len(steps) < 2:
        return None
    return float(np.trapezoid(np.array(curve.values)[finite], steps) / np.ptp(steps))


NUMBERS: dict[str, Number] = {
    AREA: Number(
        "area",
        ".3f",
        "mean held-out accuracy over the run's steps",
        ACCURACY,
        lambda run, name: area(run.series(name)),
    ),
    "accuracy": Number(
        "at the end", ".3f", "held-out accuracy of the last policy", ACCURACY, Curves.last
    ),
    IN_BF16: Number(
        "in BF16",
        ".3f",
        "held-out accuracy of the last policy in a BF16 engine",
        "",
        lambda run, name: None,
    ),
    "k3_kl": Number(
        "mismatch",
        ".1e",
        "k3 KL of sampler and learner, nats a token, median step",
        MISMATCH,
    ),
    "abs_difference": Number(
        "mean abs d",
        ".4f",
        "learner's logprob less the sampler's, nats, median step",
        "rollout_corr/logp_abs_diff_mean",
    ),
    "sample_size": Number(
        "ESS",
        ".1%",
        "effective sample size of the applied weights, median step",
        SAMPLE_SIZE,
    ),
    "rejected": Number(
        "rejected",
        ".1%",
        "tokens that rules took out, mean",
        "rollout_corr/rollout_rs_masked_fraction",
        Curves.mean,
    ),
    "step_s": Number("s/step", ".2f", "seconds of a step, median", "time/step"),
}


def numbers(run: Curves) -> Metrics:
    found = {name: number.of(run, number.metric) for name, number in NUMBERS.items()}
    return {name: value for name, value in found.items() if value is not None}


def numbers_of_file(path: Path) -> Metrics:
    """Numbers of a metrics.jsonl; empty if the file is missing."""
    if path.is_file():
        return numbers(Curves(tuple(read_metrics(path))))
    return {}
