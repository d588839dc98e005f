"""status.json in every end: what it says is true, also where there is no room to say it."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest
from helpers import file_system
from run_factory import make_scored, start

from megatron_rl.apps.reports.after_run import finish
from megatron_rl.checkpoint.resume import gap
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config, IfExists, LogSection, Wandb
from megatron_rl.files import last_lines
from megatron_rl.tracking import record, wandb_log
from megatron_rl.tracking.causes import Cause
from megatron_rl.tracking.console import PlainDisplay
from megatron_rl.tracking.disk import RecordLost
from megatron_rl.tracking.metrics_file import read_lines, read_metrics
from megatron_rl.tracking.rollout_file import read_rollouts, recorded_steps
from megatron_rl.tracking.run_dir import RunDir, open_run
from megatron_rl.tracking.status import beat, mark_status, read_status


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    with file_system(tmp_path / "tiny", "256k") as path:
        if not path.is_mount():
            pytest.skip("needs the right to mount")
        yield path


def fill(folder: Path) -> None:
    (folder / "filler").write_bytes(bytes(shutil.disk_usage(folder).free))
    assert shutil.disk_usage(folder).free == 0


@pytest.mark.fault(
    "the disk of a run's directory is full", "the run goes on, says so once, and tears no file"
)
@pytest.mark.parametrize("freed", [True, False])
def test_a_full_disk(tiny: Path, freed: bool) -> None:
    said = StringIO()
    recorder = start(tiny / "run", steps=60, display=PlainDisplay(said))
    recorder.log(0, {})
    recorder.rollouts(0, make_scored(4)[0])
    fill(tiny)
    with recorder:
        for step in range(1, 61):
            recorder.rollouts(step, make_scored(400 if step <= 50 else 1)[0])
            recorder.ledger(step, (step, step + 1), [step])
            recorder.log(step, {"loss/total": 1.0})
            if freed and step == 50:
                assert len(read_metrics(recorder.run.metrics)) < 50
                (tiny / "filler").unlink()
    run = RunDir(tiny / "run")
    lines, incomplete = read_lines(run.metrics)
    ledger = [json.loads(line)["step"] for line in run.ledger.read_text().splitlines()]
    status = read_status(run.path)
    assert status["state"] == "finished"
    assert incomplete == 0
    assert said.getvalue().count("has no room for") == 2  # lines, rollouts
    assert not list(run.path.rglob("*.partial"))
    found = [step for step, path in recorded_steps(run.rollouts) if read_rollouts(path)]
    assert found[0] == 0
    assert len(found) == 61 - status["unrecorded"]["rollouts"]
    assert (51 in found) == freed
    if freed:
        assert len(lines) == 61
        assert ledger == [*range(1, 61)]
        assert status["unrecorded"]["lines"] == 0
        assert said.getvalue().count("has room again") == 2
        assert gap(run.path, 60) is None
    else:
        assert status["unrecorded"]["lines"] == (61 - len(lines)) + (60 - len(ledger)) > 0
        assert gap(run.path, 60) is not None


@pytest.mark.fault(
    "the disk is full when a run starts", "a sentence names the place, and nothing is left"
)
def test_a_full_disk_at_the_start(tiny: Path) -> None:
    fill(tiny)
    with pytest.raises(ConfigError, match=r"run\.root=.*No space left"):
        open_run(tiny / "run", IfExists.refuse, "run: {name: run}")
    assert [entry.name for entry in tiny.iterdir()] == ["filler"]


@pytest.mark.fault("the place of the runs can only be read", "a sentence names it")
def test_a_place_that_can_only_be_read(tiny: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny)], check=True)
    with pytest.raises(ConfigError, match=r"run\.root=.*(written|Read-only)"):
        open_run(tiny / "run", IfExists.refuse, "run: {name: run}")


@pytest.mark.fault(
    "a run's directory is removed or moved while it goes on", "the run fails by a sentence"
)
@pytest.mark.parametrize("moved", [True, False])
def test_a_directory_that_goes_away(tmp_path: Path, run_folder: Path, moved: bool) -> None:
    recorder = start(run_folder)
    recorder.log(0, {})
    if moved:
        run_folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(run_folder)
    with pytest.raises(RecordLost, match=r"run/(metrics|rollouts).*cannot be written"), recorder:
        recorder.rollouts(1, make_scored(400)[0])
    assert not run_folder.exists()


@pytest.mark.fault(
    "a run is asked to end after its step", "its status says that it did not finish, where and why"
)
def test_a_run_that_is_asked_to_stop(tmp_path: Path) -> None:
    cases = (
        (1, True, "stopped"),
        (3, True, "finished"),
        (1, False, "finished"),
    )
    for name, (steps, asked, state) in zip("abc", cases, strict=True):
        with start(tmp_path / name) as recorder:
            recorder.log(steps, {})
            recorder.end_early("asked to by SIGUSR1", asked=asked)
        status = read_status(tmp_path / name)
        assert (status["state"], status["step"], status["steps"]) == (state, steps, 3)
        assert f"step {steps} of 3" in status["reason"]
        assert "SIGUSR1" in status["reason"]


@pytest.mark.fault(
    "the status of a run is requested",
    "its status has process, host, start and last sign of life",
)
def test_a_sign_of_life(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = start(run_folder)
    first = read_status(run_folder)
    assert first["pid"] == os.getpid()
    assert first["host"] == os.uname().nodename
    assert first["started"] <= first["heartbeat"]
    mark_status(run_folder, "running", heartbeat="2020-01-01T00:00:00+00:00")
    monkeypatch.setattr(record, "BEAT_S", 0.0)
    time.sleep(0.01)
    with recorder.phase("rollout"):
        pass
    later = read_status(run_folder)
    assert later["heartbeat"] >= first["heartbeat"]
    assert (later["state"], later["pid"], later["started"]) == (
        "running",
        first["pid"],
        first["started"],
    )


@pytest.mark.fault("the reason of an end is endless", "the status is still one block, and whole")
def test_an_endless_reason(run_folder: Path) -> None:
    open_run(run_folder, IfExists.refuse, "run: {name: run}")
    mark_status(run_folder, "failed", "é" * 100_000)
    assert (run_folder / "status.json").stat().st_size < 4096
    beat(run_folder)
    assert read_status(run_folder)["pid"] == os.getpid()


@pytest.mark.fault("a log is large, endless in one line, or gone", "its end is read, and no more")
def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.seek(3 << 30)  # holes
        file.write(b"\n" + b"y" * 9000 + b"\nlast\n")
    lines = last_lines(log, 2)
    assert [len(line) for line in lines] == [1000, 4]
    assert lines[-1] == "last"
    assert last_lines(tmp_path / "none", 2) == []


@pytest.mark.fault(
    "W&B's server cannot be reached", "the run goes on offline within seconds, and says so"
)
@pytest.mark.parametrize("mode", [Wandb.online, Wandb.auto])
def test_wandb_out_of_reach(run_folder: Path, monkeypatch: pytest.MonkeyPatch, mode: Wandb) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb_log, "INIT_S", 2.0)
    said = StringIO()
    with start(
        run_folder, Config(log=LogSection(wandb=mode)), display=PlainDisplay(said)
    ) as recorder:
        recorder.log(1, {"loss/total": 1.0})
    assert "offline: " in said.getvalue()
    assert "wandb sync" in said.getvalue()
    (file,) = (run_folder / "wandb").glob("offline-run-*/*.wandb")
    assert b"loss/total" in file.read_bytes()
    assert read_status(run_folder)["state"] == "finished"


@pytest.mark.fault(
    "the loop of a run fails", "status, driver.log and report name class, phase and what to change"
)
def test_why_a_run_failed(run_folder: Path) -> None:
    recorder = start(run_folder)
    recorder.log(0, {})
    log = recorder.run.logs / "rank_0.log"
    log.write_text("<of> rank 0\n")
    with pytest.raises(MemoryError), recorder, recorder.phase("update"), recorder.phase("reduce"):
        raise MemoryError
    cause = read_status(run_folder)["cause"]
    assert (cause["class"], cause["process"], cause["phase"], cause["log"]) == (
        "MemoryError",
        "rank 0",
        "reduce",
        str(log),
    )
    assert "learner.tokens_per_microbatch" in cause["advice"]
    assert Cause.read(cause).paragraph() in (log.parent / "driver.log").read_text()
    assert finish(recorder.run).startswith("report: ")
    page = (run_folder / "report.html").read_text()
    assert "<h2>run: MemoryError</h2>" in page
    assert "&lt;of&gt; rank 0" in page
    assert page.index("run: MemoryError") < page.index("<section class=cards>")


@pytest.mark.fault(
    "another user's status.json names a file of this machine as the log",
    "the report does not show it",
)
def test_a_log_elsewhere_is_not_shown(tmp_path: Path, run_folder: Path) -> None:
    secret = tmp_path / "attempt_1" / "rank_0.log"
    secret.parent.mkdir()
    secret.write_text("not to be seen")
    recorder = start(run_folder)
    recorder.log(0, {})
    recorder.close("failed", "ValueError: x")
    for log in (str(secret), "attempt_1/rank_0.log", "/rank_0.log", "../attempt_1/rank_0.log"):
        cause = {"class": "<b>", "log": log}
        mark_status(run_folder, "failed", "ValueError: x", cause=cause)
        assert finish(recorder.run).startswith("report: ")
        page = (run_folder / "report.html").read_text()
        assert "not to be seen" not in page
        assert "<h2>run: &lt;b&gt;</h2>" in page


@pytest.mark.fault(
    "a run fails after an exception that was dealt with", "its phase is that of the last one"
)
def test_the_phase_of_an_exception_that_ended_nothing(run_folder: Path) -> None:
    recorder = start(run_folder)
    recorder.log(0, {})
    with suppress(ValueError), recorder.phase("rollout"):
        raise ValueError
    with pytest.raises(KeyError), recorder, recorder.phase("sync"):
        raise KeyError
    assert read_status(run_folder)["cause"]["phase"] == "sync"


@pytest.mark.fault(
    "a run that failed goes on", "the cause of the attempt before is no longer its own"
)
def test_a_cause_is_of_one_attempt(run_folder: Path) -> None:
    run_folder.mkdir()
    mark_status(run_folder, "failed", "ValueError: x", cause={"class": "ValueError"})
    assert "cause" in read_status(run_folder)
    mark_status(run_folder, "running")
    assert "cause" not in read_status(run_folder)
    mark_status(run_folder, "finished")
    assert "cause" not in read_status(run_folder)
