"""Logs a comparison at W&B, where its runs were logged there, as one more run in their group:
tables of runs and cells, curves, bars, and the findings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.apps.comparison.comparison import Comparison
from megatron_rl.apps.comparison.findings import summary
from megatron_rl.apps.comparison.page import bars, curves
from megatron_rl.apps.reports.run_data import RunData
from megatron_rl.checkpoint.resume import flatten
from megatron_rl.config.schema import LogSection, Wandb
from megatron_rl.tracking.metrics_file import ACCURACY, AREA, MISMATCH, NUMBERS
from megatron_rl.tracking.wandb_log import ID, WandbRun, in_columns, resolve_mode

JOB_TYPE = "comparison"


def log_comparison(comparison: Comparison, runs: Sequence[RunData], folder: Path) -> str:
    """Log a comparison at W&B; returns where it is seen or how it is sent there, empty where runs
    were not logged.
    """
    asked = {_mode(run) for run in runs} - {Wandb.none}
    if not asked:
        return ""
    mode = next(one for one in (Wandb.online, Wandb.auto, Wandb.offline) if one in asked)
    folder.mkdir(parents=True, exist_ok=True)
    about = {"axes": list(comparison.axes), "reference": list(comparison.reference or ())}
    logged = WandbRun(about, folder, resolve_mode(mode), job_type=JOB_TYPE, group=comparison.name)
    wandb = logged.wandb
    figures = {
        "accuracy": curves(comparison, ACCURACY),
        "mismatch": curves(comparison, MISMATCH),
        "area": bars(comparison, AREA),
    }
    logged.run.log(
        {
            "runs": wandb.Table(*_runs(comparison, {run.name: run for run in runs})),
            "cells": wandb.Table(*_cells(comparison)),
            **{name: figure for name, figure in figures.items() if figure},
        }
    )
    logged.run.summary.update(_summary(comparison))
    where = logged.where
    logged.end(0)
    return where


def _mode(run: RunData) -> Wandb:
    mode = Wandb(run.setting("log.wandb", "none"))
    return LogSection(trackers=run.setting("log.trackers", []), wandb=mode).wandb_mode


def _runs(comparison: Comparison, runs: dict[str, RunData]) -> tuple[list[str], list[list[Any]]]:
    """Head and rows of a table of runs: labels, seed, state, numbers, correction key by key."""
    corrections = {}
    for name, run in runs.items():
        values = flatten(in_columns({"correction": run.setting("correction", {})}))
        corrections[name] = {key: "" if one is None else str(one) for key, one in values}
    keys = list(dict.fromkeys(key for one in corrections.values() for key in one))
    head = ["run", "id", *comparison.axes, "seed", "state", *NUMBERS, *keys]
    rows = []
    for cell in comparison.cells:
        for one in cell.runs:
            mine = corrections.get(one.name, {})
            about = [one.name, _id(runs.get(one.name)), *cell.labels, one.seed, one.state]
            numbers = map(one.numbers.get, NUMBERS)
            rows.append([*about, *numbers, *(mine.get(key, "") for key in keys)])
    return head, rows


def _cells(comparison: Comparison) -> tuple[list[str], list[list[Any]]]:
    head = [*comparison.axes, "finished", *NUMBERS]
    rows = [
        [*cell.labels, len(cell.finished), *map(cell.mean, NUMBERS)] for cell in comparison.cells
    ]
    return head, rows


def _summary(comparison: Comparison) -> dict[str, Any]:
    first, *rest = summary(comparison)
    means = {
        f"{number}/{cell.name}": value
        for cell in comparison.cells
        for number in NUMBERS
        if (value := cell.mean(number)) is not None
    }
    return {"recommendation": first, "findings": "\n".join(rest), **means}


def _id(run: RunData | None) -> str:
    """The run's own id at W&B."""
    path = run.path / ID if run else None
    if path and path.is_file():
        return path.read_text(encoding="utf-8").strip()
    return ""
