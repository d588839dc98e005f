"""What trackers hold of a run is what metrics.jsonl holds, by name and step, and no tracker ends a run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import psutil
import pytest
from run_factory import start
from wandb_files import logged_rows, records

from megatron_rl.config.schema import Config, LogSection, TrackerName, Wandb
from megatron_rl.tracking.console import PlainDisplay
from megatron_rl.tracking.metrics_file import encode_line, read_metrics
from megatron_rl.tracking.status import own_commit, read_status
from megatron_rl.tracking.trackers import Trackers

Rows = dict[int, dict[str, float]]
ALL = [TrackerName.wandb, TrackerName.tensorboard, TrackerName.mlflow]
LOG = LogSection(trackers=ALL, wandb=Wandb.offline)

KILLED = """
import math, os, signal, sys
from pathlib import Path
from run_factory import start
from test_trackers import LOG
from megatron_rl.config.schema import Config
recorder = start(Path(sys.argv[1]), Config(log=LOG))
for step in range(4):
    odd = {1: math.nan, 2: -math.inf}.get(step, 0.1)
    metrics = {"loss/total": step / 7, "optim/grad_norm": odd, "sync/bytes": 123_456_789_012 + step}
    recorder.log(step, metrics | ({"eval/pass@4": 0.3} if step % 2 else {}))
os.kill(os.getpid(), signal.SIGKILL)
"""


def of_metrics(run: Path) -> Rows:
    return {int(row["progress/step"]): row for row in read_metrics(run / "metrics.jsonl")}


def of_wandb(run: Path) -> Rows:
    rows: Rows = {}
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):  # in the order of attempts
        rows |= logged_rows(file)
    return rows


def of_tensorboard(run: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    rows: Rows = {}
    for name in found.Tags()["tensors"]:
        events = found.Tensors(name)
        assert len({event.step for event in events}) == len(events), name  # no repeated step
        for event in events:
            rows.setdefault(event.step, {})[name] = make_ndarray(event.tensor_proto).item()
    return rows


def mlflow_run(run: Path):
    from mlflow import MlflowClient

    client = MlflowClient((run / "mlflow").as_uri())
    (experiment,) = client.search_experiments(filter_string="name = 'megatron-rl'")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def of_mlflow(run: Path) -> Rows:
    client, found = mlflow_run(run)
    rows: Rows = {}
    for name in found.data.metrics:
        for one in client.get_metric_history(found.info.run_id, name):  # in the order of logging
            rows.setdefault(one.step, {})[name.replace("_at_", "@")] = one.value
    return rows


READERS: dict[str, Callable[[Path], Rows]] = {
    "wandb": of_wandb,
    "tensorboard": of_tensorboard,
    "mlflow": of_mlflow,
}


def assert_complete(run: Path) -> None:
    expected = of_metrics(run)
    for tracker, read in READERS.items():
        found = read(run)
        assert found.keys() == expected.keys(), tracker
        for step, row in expected.items():
            assert found[step] == pytest.approx(row, rel=1e-15, abs=0, nan_ok=True), tracker


@pytest.mark.fault(
    "a run with trackers is killed and resumed", "each tracker has every value of metrics.jsonl"
)
def test_every_value_by_name_and_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folders = (str(Path(__file__).parent), str(Path(__file__).parents[1]))
    path = os.pathsep.join((*folders, *sys.path))
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(run)], env=os.environ | {"PYTHONPATH": path}
    )
    assert killed.wait(300) == -signal.SIGKILL
    for one in psutil.process_iter(["cmdline"]):  # W&B's own process ends after its parent
        if {"wandb-core", str(killed.pid)} <= {
            Path(word).name for word in one.info["cmdline"] or ()
        }:
            one.wait(60)
    assert len(of_metrics(run)) == 4
    assert_complete(run)

    resumed = Trackers(LOG, {}, run, resumes_after=1)
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(2, 6):
            row = {"progress/step": step, "loss/total": -step / 7, "loss/entropy": math.inf}
            file.write(encode_line(row) + "\n")
            resumed.log(step, row)
    resumed.finish("failed")
    rows = of_metrics(run)
    assert [rows[step]["loss/total"] for step in (1, 2)] == [1 / 7, -2 / 7]
    for tracker, read in READERS.items():
        for step, row in rows.items():
            found = {name: read(run)[step][name] for name in row}
            assert found == pytest.approx(row, rel=1e-15, abs=0, nan_ok=True), tracker
    assert mlflow_run(run)[1].info.status == "FAILED"
    last = max((run / "wandb").glob("offline-run-*/*.wandb"))
    assert [record.exit.exit_code for record in records(last, "exit")] == [1]


@pytest.mark.fault(
    "a tracker's server cannot be reached", "the run and other trackers continue, reported once"
)
def test_a_tracker_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:canary-19@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said = StringIO()
    log = LogSection(trackers=[TrackerName.tensorboard, TrackerName.mlflow])
    with start(tmp_path / "run", Config(log=log), display=PlainDisplay(said)) as recorder:
        recorder.log(0, {"loss/total": 1.0})
        recorder.log(1, {"loss/total": 2.0})
    assert said.getvalue().count("mlflow: the tracker failed") == 1
    assert "canary-19" not in said.getvalue()
    assert of_tensorboard(tmp_path / "run") == of_metrics(tmp_path / "run")
    assert read_status(tmp_path / "run")["state"] == "finished"


def test_fields_of_the_wandb_run(tmp_path: Path) -> None:
    fields = {"tags": ["a", "b"], "group": "g", "job_type": "train", "git_commit": True}
    log = LogSection(wandb=Wandb.offline, wandb_run={**fields, "system_metrics": True})
    with start(tmp_path / "run", Config(log=log)) as recorder:
        recorder.log(0, {"loss/total": 1.0})
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    about = next(iter(records(file, "run"))).run
    assert [*about.tags] == ["a", "b"]
    assert (about.run_group, about.job_type) == ("g", "train")
    assert (about.git.commit, about.git.remote_url) == (own_commit(), "")
    assert list(records(file, "stats"))
