"""Hang detection from heartbeats as ranks write them and real processes: who is named, and when the
run is over.
"""

import json
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for

from megatron_rl.processes.heartbeat import file_of
from megatron_rl.processes.process import birth_of, state_of
from megatron_rl.supervision.watch import MARGIN_S, SILENT_S, HangDetector
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import mark_status, read_status

TIMEOUT_S = 60
LIMIT_S = 90
WAITS = {"whom": "engine", "limit_s": LIMIT_S}


class Run:
    """Heartbeats are written by hand, and a second passes with every look."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.folder = folder
        file_of(folder, 0).parent.mkdir(parents=True)
        (folder / "logs" / "attempt_1").mkdir()
        mark_status(folder, "running")
        self.watch = HangDetector(folder, TIMEOUT_S, clock=lambda: self.now)
        self.beats = 0

    def beat(self, rank: int, process: subprocess.Popen[bytes] | None = None, **more: Any) -> None:
        pid = process.pid if process else os.getpid()
        self.beats += 1
        content = {
            "rank": rank,
            "host": platform.node(),
            "pid": pid,
            "birth": birth_of(pid),
            "beat": self.beats,
            "ended": False,
            "phase": "update",
            "entered": 7,
            "progress": 1,
            "waits": None,
            "children": [],
            "in_collective": True,
        }
        file_of(self.folder, rank).write_text(json.dumps(content | more))

    def looks(self, count: int, rank: int | None = None) -> list[str]:
        """The names of those in an issue after so many seconds."""
        for _ in range(count):
            self.look(rank)
        return [f"{one.process} {one.how}" for one in self.watch.issues]

    def look(self, rank: int | None = None, seconds: float = 1.0) -> str | None:
        self.now += seconds
        return self.watch.look(rank)

    def said(self) -> str:
        return (RunDir(self.folder).logs / "driver.log").read_text()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen(["sleep", "1000"])
    yield one
    one.kill()
    one.wait()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(process.pid) == "T")


def resume(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: state_of(process.pid) != "T")


@pytest.mark.fault(
    "a rank is stopped (SIGSTOP), and goes on", "it is named once, and once when it goes on"
)
def test_a_stopped_rank(run: Run, process: subprocess.Popen[bytes]) -> None:
    run.beat(0)
    run.beat(1, process)
    assert run.looks(1) == []
    stop(process)
    assert run.looks(5) == []  # a short pause
    assert run.looks(15) == ["rank 1 stopped"]
    stuck = read_status(run.folder)["stuck"]
    assert (stuck["process"], stuck["how"], stuck["pid"]) == ("rank 1", "stopped", process.pid)
    resume(process)
    assert run.looks(1) == []
    assert read_status(run.folder)["stuck"] is None
    assert (run.said().count("is stopped"), run.said().count("continues after")) == (1, 1)


@pytest.mark.fault(
    "a rank, or the engine that it waits for, stays stopped", "the run ends, and names it"
)
def test_who_stays_stopped(run: Run, process: subprocess.Popen[bytes]) -> None:
    stop(process)
    run.beat(0, process, waits=WAITS)  # it waits for no other process while it is stopped itself
    run.looks(TIMEOUT_S - 1)
    assert run.look() is None
    assert "run.hang_timeout_s=60" in str(run.look())
    run.beat(0, children=[{"name": "engine", "pid": process.pid}])
    assert run.looks(10) == ["engine stopped"]
    assert not run.watch.blocking
    run.beat(
        0,
        children=[{"name": "engine", "pid": process.pid}],
        waits=WAITS,
    )
    run.looks(LIMIT_S)
    assert run.look() is None
    run.looks(int(MARGIN_S))
    assert str(run.look()).startswith("engine (process")


@pytest.mark.fault("a rank's interpreter is held, or its machine is gone", "it alone is named")
def test_a_silent_rank(run: Run) -> None:
    run.beat(1, host="node7")
    for _ in range(TIMEOUT_S + 2):
        run.beat(0)
        run.look()
    assert run.looks(1) == ["rank 1 hangs"]
    run.beat(1, host="node7", progress=2)
    assert run.looks(1) == []


def test_a_rank_that_has_ended_is_not_missed(run: Run) -> None:
    run.beat(1, host="node7", ended=True)
    for progress in range(2 * TIMEOUT_S):
        run.beat(0, progress=progress)
        assert run.looks(1) == []


@pytest.mark.fault(
    "a rank does not come to where the others wait", "it is named, and not the others"
)
@pytest.mark.parametrize(
    ("late", "named"),
    [
        ({"in_collective": False}, ["rank 1 hangs"]),
        ({"entered": 6}, ["rank 1 hangs"]),
        ({}, ["rank 0 hangs", "rank 1 hangs", "rank 2 hangs"]),
    ],
)
def test_who_does_not_arrive(run: Run, late: dict[str, Any], named: list[str]) -> None:
    for _ in range(TIMEOUT_S + 1):
        for rank in range(3):
            run.beat(rank, **(late if rank == 1 else {}))
        run.look()
    assert run.looks(1) == named
    assert "run.hang_timeout_s=60" in str(run.look())


def test_the_engine_that_is_waited_for_is_named(run: Run) -> None:
    children = [{"name": "engine", "pid": None}, {"name": "reward worker 0", "pid": None}]
    for _ in range(LIMIT_S + int(MARGIN_S)):
        run.beat(0, phase="rollout", waits=WAITS, children=children)
        assert run.look() is None
    assert run.looks(2) == ["engine hangs"]
    assert run.look()


def test_a_run_that_moves_is_not_over(run: Run, process: subprocess.Popen[bytes]) -> None:
    stop(process)
    run.beat(1, process)
    for progress in range(3 * TIMEOUT_S):
        run.beat(0, progress=progress)
        assert run.look() is None
    assert run.watch.blocking


@pytest.mark.fault(
    "a whole run is suspended for an hour, the one that watches it too", "no process is named"
)
def test_a_suspended_run_has_no_issue(run: Run) -> None:
    run.beat(0)
    run.look()
    assert run.look(seconds=3600) is None
    assert not run.watch.issues


def test_the_lowest_rank_that_lives_looks(run: Run, process: subprocess.Popen[bytes]) -> None:
    run.beat(0, process)
    run.beat(1)
    assert run.looks(1, 1) == []
    stop(process)
    assert run.looks(10, 1) == ["rank 0 stopped"]
    resume(process)
    for _ in range(int(SILENT_S) + TIMEOUT_S):
        run.beat(1)
        run.look(1)
    assert run.looks(1, 1) == ["rank 0 hangs"]


def test_incomplete_and_foreign_files_are_skipped(run: Run) -> None:
    run.beat(0)
    file_of(run.folder, 1).write_text('{"rank": 1, "bea')
    file_of(run.folder, 2).write_text("")
    assert run.looks(1) == []
