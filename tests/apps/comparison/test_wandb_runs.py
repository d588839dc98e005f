"""Comparison at W&B: an offline group, read back from the files that `wandb sync` sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from run_factory import quiet
from wandb_files import records

from megatron_rl.apps.comparison.comparison import Cell, Comparison, Result
from megatron_rl.apps.comparison.wandb_runs import log_comparison
from megatron_rl.apps.reports.run_data import load_run
from megatron_rl.config import load, to_yaml
from megatron_rl.config.schema import LogSection, Wandb
from megatron_rl.tracking.metrics_file import AREA, NUMBERS
from megatron_rl.tracking.record import Recorder
from megatron_rl.tracking.wandb_log import ID, in_columns

GROUP = "evidence"
RULE = "correction={preset: geo_mask, reject: [{level: sequence, stat: ratio, reduce: mean, low: 0.95, high: 1.05}]}"


def logged(folder: Path, name: str, correction: str, last: float) -> Path:
    """A run of two steps that logs offline."""
    (folder / "base.yaml").write_text("log: {wandb: offline}\n")
    text = to_yaml(load(folder / "base.yaml", [correction, f"run.name={name}"]))
    with Recorder(
        LogSection(wandb=Wandb.offline),
        text,
        folder / name,
        2,
        quiet(2),
    ) as recorder:
        recorder.log(0, {"eval/accuracy": 0.25})
        for step in (1, 2):
            recorder.log(step, {"eval/accuracy": last, "rollout_corr/k3_kl": 0.01})
    return folder / name


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_RUN_GROUP", GROUP)
        runs = []
        for label, correction, last in (("tis", "correction=tis", 0.75), ("geo_mask", RULE, 0.5)):
            patch.setenv("WANDB_TAGS", f"correction:{label}")
            runs.append(load_run(logged(folder, f"{GROUP}_{label}", correction, last)))
        patch.delenv("WANDB_TAGS")
        cells = [Cell((run.name.removeprefix(f"{GROUP}_"),), (Result.of(run, 1),)) for run in runs]
        comparison = Comparison(GROUP, ("correction",), tuple(cells))
        where = log_comparison(comparison, runs, folder / f"{GROUP}_comparison")
    assert where.startswith("wandb sync ")
    return folder, comparison


def file_of(run: Path) -> Path:
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    return file


def record(run: Path) -> tuple[Any, dict[str, Any]]:
    """A run's first record, and its configuration."""
    first = next(iter(records(file_of(run), "run"))).run
    return first, {item.key: json.loads(item.value_json) for item in first.config.update}


def held(run: Path, kind: str) -> dict[str, Any]:
    """The last value of each key of the records of one kind."""
    found = {}
    for one in records(file_of(run), kind):
        of_kind = getattr(one, kind)
        for item in (*getattr(of_kind, "update", ()), *getattr(of_kind, "item", ())):
            found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found


def test_each_run_says_where_it_stands_in_the_group(group: tuple[Path, Comparison]) -> None:
    folder, _ = group
    run = folder / f"{GROUP}_tis"
    first, config = record(run)
    assert first.run_group == GROUP
    assert list(first.tags) == ["correction:tis"]
    assert first.run_id == (run / ID).read_text().strip()
    assert config["correction"]["preset"] == "tis"
    summary = held(run, "summary")
    assert summary[f"summary/{AREA}"] == pytest.approx(0.625)
    assert summary["summary/accuracy"] == 0.75
    assert summary["summary/k3_kl"] == 0.01
    assert summary["summary/step_s"] > 0


def test_a_correction_has_a_column_for_every_value(group: tuple[Path, Comparison]) -> None:
    folder, _ = group
    _, config = record(folder / f"{GROUP}_geo_mask")
    assert config["correction"]["reject"]["1"]["low"] == 0.95
    empty = {"correction": {"reject": []}, "run": {}}
    assert in_columns(empty) == {"correction": {"reject": {}}, "run": {}}
    assert in_columns({"run": {}}) == {"run": {}}


def test_one_run_of_the_group_holds_the_tables_and_the_figure(
    group: tuple[Path, Comparison],
) -> None:
    folder, _ = group
    run = folder / f"{GROUP}_comparison"
    first, _ = record(run)
    assert (first.run_group, first.job_type) == (GROUP, "comparison")
    (history,) = list(records(file_of(run), "history"))
    kept: dict[str, dict[str, Any]] = {}
    for item in history.history.item:
        kept.setdefault(item.nested_key[0], {})[item.nested_key[-1]] = json.loads(item.value_json)
    (files,) = run.glob("wandb/offline-run-*/files")
    tables = {
        name: json.loads((files / kept[name]["path"]).read_text()) for name in ("runs", "cells")
    }
    columns = tables["runs"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in tables["runs"]["data"]]
    assert [row["run"] for row in rows] == [f"{GROUP}_tis", f"{GROUP}_geo_mask"]
    assert [row["correction"] for row in rows] == ["tis", "geo_mask"]
    assert [row["id"] for row in rows] == [
        (folder / row["run"] / ID).read_text().strip() for row in rows
    ]
    assert rows[0][AREA] == pytest.approx(0.625)
    assert rows[0]["correction.weight.level"] == "token"
    assert rows[1]["correction.reject.1.low"] == "0.95"
    assert {row[0]: row[2] for row in tables["cells"]["data"]} == {
        "tis": pytest.approx(0.625),
        "geo_mask": 0.4375,
    }
    assert {kept[name]["_type"] for name in ("accuracy", "mismatch", "area")} == {"plotly-file"}
    summary = held(run, "summary")
    assert summary["recommendation"].startswith("No recommendation")
    assert summary[f"{AREA}/tis"] == pytest.approx(0.625)
    assert set(NUMBERS) >= {key.partition("/")[0] for key in summary if key.endswith("/tis")}


def test_runs_that_were_not_logged_there_leave_nothing(tmp_path: Path) -> None:
    assert (
        log_comparison(
            Comparison(GROUP, ("correction",), ()),
            [],
            tmp_path / "none",
        )
        == ""
    )
    assert not (tmp_path / "none").exists()
