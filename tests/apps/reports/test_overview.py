"""`megatron-rl status` and `watch`: runs that are active, ended, or incomplete."""

import io
import json
import os
import shutil
import time
from pathlib import Path

import pytest
from helpers import Command
from run_factory import make_run

from megatron_rl.apps.reports.overview import describe, watch
from megatron_rl.processes.threads import in_thread
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import mark_status, now, read_status

STEPS = 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs"), "mine", STEPS)


@pytest.fixture
def run(made: Path) -> Path:
    mark_status(made, "finished", "", step=STEPS, steps=STEPS, alarms={})
    return made


def lines(text: str) -> dict[str, str]:
    return {line.split()[0]: line.strip() for line in text.splitlines()}


def test_a_finished_run(run: Path, command: Command) -> None:
    said = lines(command("status", run))
    assert said["mine"] == "mine"
    assert said["finished,"] == "finished, attempt 1"
    assert f"{STEPS} of {STEPS}, " in said["step"]
    assert "left" not in said["step"]
    assert any(bar in said["eval"] for bar in "▁█")
    assert said["checkpoint"].endswith("none")
    assert "alarm" not in said


def test_a_run_that_goes_on(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (8, 12):
        (RunDir(run).checkpoints / f"step_{step}").mkdir(parents=True, exist_ok=True)
    active = {"entropy": {"since": 7, "value": 0.02}}
    mark_status(run, "running", "", steps=4 * STEPS, alarms=active, heartbeat=now())
    # as its owner, who lives, would see it
    monkeypatch.setattr("megatron_rl.apps.reports.run_data.known_status", read_status)
    said = lines(describe(run))
    assert "left" in said["step"]
    assert "since 7, value 0.02" in said["alarm"]
    assert "ago" in said["sign"]
    assert "step 12, 2 kept" in said["checkpoint"]


@pytest.mark.fault(
    "a watched run's files grow by incomplete lines", "watching continues to the run's end"
)
def test_watching_a_run_with_incomplete_files(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as its owner, who lives, would see it
    monkeypatch.setattr("megatron_rl.apps.reports.run_data.known_status", read_status)
    run = shutil.copytree(run, tmp_path / "mine")
    stream = io.StringIO()
    mark_status(run, "running", "")
    watching = in_thread("watch", lambda: watch([run], 0.01, stream))
    status = (run / "status.json").read_text()
    with (run / "metrics.jsonl").open("a") as metrics:
        for number in range(40):
            metrics.write('\n{"progress/step": 3, "rew' if number % 2 else 'ard/mean": 0.5}')
            metrics.flush()
            (run / "status.json").write_text(status[: number * len(status) // 40])
            time.sleep(0.01)
    assert not watching.done()
    mark_status(run, "finished", "", step=STEPS, steps=STEPS)
    watching.result(60)
    assert "not readable" in stream.getvalue()


def test_incomplete_and_unknown_folders(run: Path, tmp_path: Path, command: Command) -> None:
    for content in (
        "{",
        "[1]",
        json.dumps(
            {
                "state": "running",
                "alarms": [1, "x"],
                "steps": "x",
                "heartbeat": 3,
            }
        ),
    ):
        incomplete = tmp_path / "incomplete"
        incomplete.mkdir(exist_ok=True)
        (incomplete / "status.json").write_text(content)
        (incomplete / "metrics.jsonl").write_text('{"progress/step": 1}\n{"prog')
        assert "1 of" in command("status", incomplete, run)
    assert "not a run directory" in command("status", tmp_path, status=2)


@pytest.mark.fault("a file of a run is a pipe", "status and report name it, and wait for nothing")
@pytest.mark.parametrize("name", ["metrics.jsonl", "status.json", "config.yaml", "env.json"])
def test_a_pipe_as_a_file_of_a_run(tmp_path: Path, name: str, command: Command) -> None:
    run = make_run(tmp_path, "run", 1)
    (run / name).unlink()
    os.mkfifo(run / name)
    for word in ("status", "report"):
        assert "no regular file" in command(word, run)
