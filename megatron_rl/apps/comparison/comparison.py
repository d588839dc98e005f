"""Results of a grid of runs, by cell and seed: numbers, curves, a table, JSON, and which cell is
better beyond noise.

A cell is a choice of one label on each axis; its runs differ in their seed alone. The labels of the
last axis are what is compared, for each choice on the axes before it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from megatron_rl.apps.reports.run_data import RunData
from megatron_rl.files import read_json
from megatron_rl.tracking.metrics_file import (
    ACCURACY,
    AREA,
    IN_BF16,
    MISMATCH,
    NUMBERS,
    SAMPLE_SIZE,
    Series,
    numbers,
)
from megatron_rl.tracking.run_dir import SUMMARY, RunDir
from megatron_rl.types import Metrics

CURVES = (ACCURACY, MISMATCH, SAMPLE_SIZE)
DIGITS = 5
# two-sided 95 % points of Student's t, by degrees of freedom; beyond them that of the last
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)


@dataclass(frozen=True)
class Result:
    """Numbers and curves of a run that a comparison reads."""

    name: str
    seed: int | None
    state: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Series] = field(default_factory=dict)
    # of learner and sampler: the smallest and the largest of all tokens
    ratios: tuple[float, float] | None = None

    @classmethod
    def of(cls, run: RunData, seed: int | None) -> Result:
        curves = {
            name: series
            for name in CURVES
            if (series := run.series(name, 0 if name == ACCURACY else 1))
        }
        low = run.series("rollout_corr/rho_min").finite
        high = run.series("rollout_corr/rho_max").finite
        ratios = (min(low), max(high)) if low and high else None
        return cls(
            run.name,
            seed,
            str(run.status.get("state", "unknown")),
            numbers(run) | _in_bf16(RunDir(run.path)),
            curves,
            ratios,
        )


def _in_bf16(run: RunDir) -> Metrics:
    """What an evaluation of the last policy in a BF16 engine has found, if there was one."""
    path = run.bf16_evaluation / SUMMARY
    if not path.is_file():
        return {}
    return {IN_BF16: read_json(path)["metrics"]["eval/accuracy"]}


@dataclass(frozen=True)
class Cell:
    labels: tuple[str, ...]
    runs: tuple[Result, ...]

    @property
    def name(self) -> str:
        return " / ".join(self.labels)

    @property
    def finished(self) -> tuple[Result, ...]:
        return tuple(one for one in self.runs if one.state == "finished")

    @property
    def whole(self) -> bool:
        """Every run has finished: one that has not would flatter the others' mean."""
        return bool(self.runs) and len(self.finished) == len(self.runs)

    def by_seed(self, number: str) -> dict[int | None, float]:
        return {one.seed: one.numbers[number] for one in self.finished if number in one.numbers}

    def outcome(self) -> list[object]:
        """Results of each run but for its time: equal in two cells of identical runs."""
        return [
            (one.seed, {**one.numbers, "step_s": None}, one.curves.get(ACCURACY))
            for one in self.runs
        ]

    def mean(self, number: str) -> float | None:
        values = self.by_seed(number).values()
        if values:
            return statistics.fmean(values)
        return None

    def written(self, number: str) -> str:
        """The mean over seeds, and from where to where they reach."""
        values = list(self.by_seed(number).values())
        form = NUMBERS[number].form
        if not values:
            return ""
        shown = f"{statistics.fmean(values):{form}}"
        if len(values) > 1:
            return f"{shown} ({min(values):{form}} to {max(values):{form}})"
        return shown

    def curve(self, metric: str) -> tuple[Series, Series, Series]:
        """The lowest, the mean and the highest of the seeds, at each step that all have."""
        curves = [one.curves[metric] for one in self.runs if metric in one.curves]
        at: dict[int, list[float]] = {}
        for curve in curves:
            for step, value in zip(curve.steps, curve.values, strict=True):
                at.setdefault(step, []).append(value)
        finite = {
            step: list(filter(math.isfinite, values))
            for step, values in sorted(at.items())
            if len(values) == len(curves)
        }
        kept = {step: values for step, values in finite.items() if values}
        low, mean, high = (
            Series(list(kept), list(map(of, kept.values()))) for of in (min, statistics.fmean, max)
        )
        return low, mean, high


@dataclass(frozen=True)
class Comparison:
    name: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    # the labels of the cell that all others are seen beside
    reference: tuple[str, ...] | None = None

    @property
    def compared(self) -> tuple[str, ...]:
        """The labels of the last axis, in their order."""
        return tuple(
            dict.fromkeys(cell.labels[-1] for cell in self.cells if cell.labels != self.reference)
        )

    def beside(self) -> Cell | None:
        return next((cell for cell in self.cells if cell.labels == self.reference), None)

    @property
    def criterion(self) -> str:
        """What cells are judged by: accuracy in BF16 where all last policies were evaluated so. The
        sampler's own includes what the policy has learned for this sampler alone.
        """
        runs = [one for cell in self.cells for one in cell.finished]
        return IN_BF16 if runs and all(IN_BF16 in one.numbers for one in runs) else AREA

    def places(self) -> dict[tuple[str, ...], list[Cell]]:
        """Labels of the other axes -> the cells that are compared there."""
        found: dict[tuple[str, ...], list[Cell]] = {}
        for cell in self.cells:
            if cell.labels != self.reference:
                found.setdefault(cell.labels[:-1], []).append(cell)
        return found

    def held(self, names: Iterable[str]) -> list[str]:
        """The numbers, of these, that any cell has."""
        return [name for name in names if any(cell.by_seed(name) for cell in self.cells)]

    def table(self, names: Sequence[str]) -> tuple[list[str], list[list[Any]]]:
        """A row for each cell: its labels, how many runs have finished, and these numbers."""
        rows = [
            [
                *cell.labels,
                f"{len(cell.finished)} of {len(cell.runs)}",
                *(cell.written(name) for name in names),
            ]
            for cell in self.cells
        ]
        return [*self.axes, "finished", *(NUMBERS[name].title for name in names)], rows

    def as_json(self) -> dict[str, Any]:
        """Everything but ratios and the curves of other metrics than accuracy, numbers rounded."""
        stored: dict[str, Any] = msgspec.to_builtins(self)
        for run in (run for cell in stored["cells"] for run in cell["runs"]):
            run.pop("ratios", None)
            run["numbers"] = {name: _rounded(value) for name, value in run["numbers"].items()}
            run["curves"] = {name: one for name, one in run["curves"].items() if name == ACCURACY}
            for curve in run["curves"].values():
                curve["values"] = list(map(_rounded, curve["values"]))
        return stored

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Comparison:
        return msgspec.convert(stored, cls)


def beyond_noise(a: Cell, b: Cell, number: str = AREA) -> bool | None:
    """Test if `a` is above `b` in a number by more than seeds explain: a paired t-test, two-sided
    at 95 %.

    The runs of a seed begin with the same policy and draw the same prompts, hence pairs. None:
    fewer than two seeds.
    """
    above = a.by_seed(number)
    below = b.by_seed(number)
    pairs = [above[seed] - below[seed] for seed in above if seed in below]
    if len(pairs) < 2:
        return None
    least = (
        STUDENT[min(len(pairs) - 1, len(STUDENT)) - 1]
        * statistics.stdev(pairs)
        / math.sqrt(len(pairs))
    )
    return statistics.fmean(pairs) > least


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
