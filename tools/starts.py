"""Starts of a grid's runs: a task's data, and a supervised warm start for each seed, shared
by all its runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grid import Grid
from outliers import with_outliers
from run_in_turn import FINISHED, Job, Runner

from megatron_rl.apps.quickstart import TASKS
from megatron_rl.models.weight_files import INDEX, SINGLE
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import known_status


def write_data(grid: Grid) -> None:
    if grid.task is not None and not (TASKS[grid.task].data / "train.jsonl").is_file():
        TASKS[grid.task].write(TASKS[grid.task].data)


def arguments(grid: Grid, root: Path, seed: int | None) -> list[str]:
    """Configuration of the warm start that a seed begins with."""
    assert grid.task is not None
    name = _name(grid, seed)
    words = [
        str(TASKS[grid.task].warm_start),
        f"run.name={name}",
        f"run.root={root}",
        "run.if_exists=resume",
    ]
    return [*words, *([] if seed is None else [f"run.seed={seed}"])]


def model_of(grid: Grid, root: Path, seed: int | None) -> Path:
    run = root / _name(grid, seed)
    if grid.outliers is None:
        return RunDir(run).model
    return run / f"outliers_{grid.outliers.factor}x{grid.outliers.channels}"


def missing(grid: Grid, root: Path, seeds: Sequence[int | None]) -> list[int | None]:
    if grid.task is None:
        return []
    return [
        seed
        for seed in seeds
        if not any((model_of(grid, root, seed) / name).is_file() for name in (SINGLE, INDEX))
    ]


def make(grid: Grid, root: Path, seeds: Sequence[int | None], runner: Runner) -> bool:
    """Those that are missing; whether all are there then."""
    wanted = missing(grid, root, seeds)
    runs = [root / _name(grid, seed) for seed in wanted]
    unfinished = {
        run.name: seed for run, seed in zip(runs, wanted, strict=True) if not _has_finished(run)
    }
    outcomes = runner.run(
        [Job(name, arguments(grid, root, seed)) for name, seed in unfinished.items()],
        lambda job: print(f"[start] {runner.progress(job)}", flush=True),
    )
    for run, seed in zip(runs, wanted, strict=True):
        if not _has_finished(run):
            where = runner.log_of(run.name) or run / "logs"
            print(
                f"{run.name}: the warm start did not finish, {outcomes[run.name]}; see {where}",
                flush=True,
            )
        elif grid.outliers is not None:
            with_outliers(
                RunDir(run).model,
                model_of(grid, root, seed),
                grid.outliers.factor,
                grid.outliers.channels,
            )
    return not missing(grid, root, seeds)


def _has_finished(run: Path) -> bool:
    return known_status(run).get("state") == FINISHED


def _name(grid: Grid, seed: int | None) -> str:
    return f"{grid.group}_start" + ("" if seed is None else f"_s{seed}")
