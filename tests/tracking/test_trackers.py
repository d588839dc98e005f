"""What trackers hold of a run is what metrics.jsonl holds, by name and step, and no tracker ends a run."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from helpers import logged
from run_factory import start
from wandb_files import logged_rows, records

from megatron_rl.config.schema import Config, LogSection, TrackerName, Wandb
from megatron_rl.tracking.metrics_file import encode_line, read_metrics
from megatron_rl.tracking.status import git_state
from megatron_rl.tracking.trackers import Trackers

Rows = dict[int, dict[str, float]]
LOG = LogSection(trackers=[TrackerName.wandb, TrackerName.tensorboard], wandb=Wandb.offline)

KILLED = """
import math, os, signal, sys, time
from pathlib import Path
from run_factory import start
from test_trackers import LOG, of_wandb
from megatron_rl.config.schema import Config
recorder = start(Path(sys.argv[1]), Config(log=LOG))
for step in range(4):
    odd = {1: math.nan, 2: -math.inf}.get(step, 0.1)
    metrics = {"loss/total": step / 7, "optim/grad_norm": odd, "sync/bytes": 123_456_789_012 + step}
    recorder.log(step, metrics | ({"eval/pass@4": 0.3} if step % 2 else {}))
for _ in range(120):  # W&B's own process writes in the background
    if len(of_wandb(Path(sys.argv[1]))) == 4:
        break
    time.sleep(0.5)
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
        for event in found.Tensors(name):  # in the order of writing
            rows.setdefault(event.step, {})[name] = make_ndarray(event.tensor_proto).item()
    return rows


READERS: dict[str, Callable[[Path], Rows]] = {
    "wandb": of_wandb,
    "tensorboard": of_tensorboard,
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
        logged = read(run)
        for step, row in rows.items():
            found = {name: logged[step][name] for name in row}
            assert found == pytest.approx(row, rel=1e-15, abs=0, nan_ok=True), tracker
    last = max((run / "wandb").glob("offline-run-*/*.wandb"))
    assert [record.exit.exit_code for record in records(last, "exit")] == [1]


@pytest.mark.fault("a tracker cannot start", "the run and other trackers continue, reported once")
def test_a_tracker_that_fails(run_folder: Path) -> None:
    run_folder.mkdir()
    (run_folder / "tensorboard").write_text("in the place of the folder")
    said = logged()
    trackers = Trackers(LOG, {}, run_folder)
    rows = {0: {"loss/total": 1.0}, 1: {"loss/total": 2.0}}
    for step, row in rows.items():
        trackers.log(step, row)
    trackers.finish("finished")
    assert sum("the tracker failed" in line for line in said) == 1
    assert of_wandb(run_folder) == rows


def test_fields_of_the_wandb_run(tmp_path: Path) -> None:
    fields = {"tags": ["a", "b"], "group": "g", "job_type": "train", "git_commit": True}
    log = LogSection(wandb=Wandb.offline, wandb_run={**fields, "system_metrics": True})
    with start(tmp_path / "run", Config(log=log)) as recorder:
        recorder.log(0, {"loss/total": 1.0})
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/*.wandb")
    about = next(iter(records(file, "run"))).run
    assert [*about.tags] == ["a", "b"]
    assert (about.run_group, about.job_type) == ("g", "train")
    assert (about.git.commit, about.git.remote_url) == (git_state()["commit"], "")
    assert list(records(file, "stats"))


# rows of one attempt, killed or finished, and what the tracker holds
ALONE = """
import json, os, signal, sys, time
from pathlib import Path
from megatron_rl.config.schema import LogSection, TrackerName
from megatron_rl.tracking.metrics_file import decode_line
from megatron_rl.tracking.trackers import Trackers
name, run, after, end = TrackerName(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
trackers = Trackers(LogSection(trackers=[name]), {"optim": {"lr": 0.1}}, run, after)
for text in sys.stdin:
    row = decode_line(text)
    trackers.log(row["progress/step"], row)
if end == "killed":
    time.sleep(2)  # Trackio writes every half second
    os.kill(os.getpid(), signal.SIGKILL)
trackers.finish(end)
rows = {}
if name == "mlflow":
    from mlflow import MlflowClient
    client = MlflowClient((run / "mlflow").as_uri())
    (found,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert (found.info.status, found.data.params) == ("FAILED", {"optim.lr": "0.1"})
    for metric in found.data.metrics:
        for one in client.get_metric_history(found.info.run_id, metric):
            rows.setdefault(one.step, {})[metric.replace("_at_", "@")] = one.value
else:
    from trackio.sqlite_storage import SQLiteStorage
    (found,) = SQLiteStorage.get_runs("megatron-rl")
    for one in SQLiteStorage.get_logs("megatron-rl", found):
        numbers = {key: value for key, value in one.items() if key not in ("timestamp", "step")}
        rows.setdefault(one["step"], {}).update(numbers)
Path(sys.argv[5]).write_text(json.dumps(rows))
"""


@pytest.fixture(scope="module", params=["mlflow", "trackio"])
def tracker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A tracker that the pinned set cannot hold, and a folder with its packages."""
    packages = tmp_path_factory.mktemp(request.param)
    wanted = {"mlflow": "mlflow-skinny>=3", "trackio": "trackio>=0.22"}[request.param]
    uv = Path(sys.executable).parent / "uv"
    command = [uv, "pip", "install", "-q", "--python", sys.executable, "--target", packages, wanted]
    if subprocess.run(command, timeout=500).returncode:
        pytest.skip(f"{wanted} cannot be installed: no package index")
    return request.param, packages


def attempt(tracker, run: Path, rows: list[dict[str, float]], after: int, end: str) -> Rows:
    name, packages = tracker
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{encode_line(row)}\n" for row in rows)
    out = run / "out.json"
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", ALONE, name, str(run), str(after), end, str(out)],
        input="".join(f"{encode_line(row)}\n" for row in rows),
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(packages), root))},
        timeout=500,
    )
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0)
    if end == "killed":
        return {}
    return {int(step): row for step, row in json.loads(out.read_text()).items()}


@pytest.mark.slow
def test_trackers_in_an_environment_of_their_own(tmp_path: Path, tracker) -> None:
    odd = [math.nan, math.inf, 123_456_789_012, 0.1]
    rows = [
        {"progress/step": step, "loss/total": step / 7, "sync/bytes": value, "eval/pass@4": 0.3}
        for step, value in enumerate(odd)
    ]
    attempt(tracker, tmp_path, rows, -1, "killed")
    again = [{"progress/step": step, "loss/total": -step / 7} for step in (2, 3, 4)]
    found = attempt(tracker, tmp_path, again, 1, "failed")
    for step, row in of_metrics(tmp_path).items():
        there = {name: found[step][name] for name in row}
        assert there == pytest.approx(row, rel=1e-15, abs=0, nan_ok=True), step
