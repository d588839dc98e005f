"""Who is named as stopped or stuck, from pulses as ranks write them and from real processes; and
when a run is over.
"""

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_for

from megatron_rl.processes.folder_lock import LOCK
from megatron_rl.processes.process import birth_of, state_of
from megatron_rl.processes.pulse import file_of
from megatron_rl.processes.stacks import ask
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.runs.status import mark_status, read_status
from megatron_rl.survival.trouble import MARGIN_S, Trouble
from megatron_rl.survival.watch import SILENT_S, Guard, Watch

TIMEOUT_S = 600.0
WAITS = {"whom": "engine", "limit_s": 900.0, "key": "sampler.request_timeout_s"}


class Run:
    """Pulses are written by hand, and a second passes with every look."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self.folder = folder
        file_of(folder, 0).parent.mkdir(parents=True)
        self.watch = Watch(folder, TIMEOUT_S, folder, clock=lambda: self.now)
        self.beats = 0

    def pulse(self, rank: int, **told: Any) -> None:
        self.beats += 1
        about = {
            "rank": rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "birth": birth_of(os.getpid()),
            "beat": self.beats,
            "phase": "update",
            "entered": 7,
            "age_s": 0.0,
            "waits": None,
            "children": [],
            "stack": [f"file.py:1 of_rank_{rank}"],
            "meets": True,
        }
        file_of(self.folder, rank).write_text(json.dumps(about | told))

    def pulse_of(self, process: subprocess.Popen[bytes], rank: int, **told: Any) -> None:
        self.pulse(rank, pid=process.pid, birth=birth_of(process.pid), **told)

    def looks(self, count: int, rank: int | None = None) -> list[tuple[list[str], list[str]]]:
        return [self.look(rank) for _ in range(count)]

    def look(self, rank: int | None = None, seconds: float = 1.0) -> tuple[list[str], list[str]]:
        """The names of those in trouble that were not before, and of those who were."""
        self.now += seconds
        new, gone = self.watch.look(rank)
        return [f"{one.process} {one.how}" for one in new], [
            f"{one.process} {one.how}" for one in gone
        ]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    one = subprocess.Popen(["sleep", "1000"])
    yield one
    one.kill()
    one.wait()


def stopped(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    wait_for(lambda: state_of(process.pid) == "T")


def goes_on(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    wait_for(lambda: state_of(process.pid) != "T")


@pytest.mark.fault(
    "a rank is stopped (SIGSTOP), and goes on", "it is named once, and once when it goes on"
)
def test_a_stopped_rank(run: Run, process: subprocess.Popen[bytes]) -> None:
    run.pulse(0)
    run.pulse_of(process, 1)
    assert run.look() == ([], [])
    stopped(process)
    found = run.looks(20)
    assert [names for names in found if any(names)] == [(["rank 1 stopped"], [])]
    assert run.watch.troubles[0].about()["phase"] == "update"
    assert run.watch.troubles[0].about()["pid"] == process.pid
    goes_on(process)
    assert run.look() == ([], ["rank 1 stopped"])


def test_a_stopped_rank_waits_for_nobody(run: Run, process: subprocess.Popen[bytes]) -> None:
    """Its last sign may be old: of a moment in which it waited for an engine's start."""
    stopped(process)
    run.pulse_of(process, 0, waits=WAITS | {"limit_s": 1e6})
    run.pulse(1, age_s=1000)
    run.looks(int(run.watch.timeout_s) - 1)
    assert run.watch.over() is None
    run.looks(3)
    assert "run.hang_timeout_s" in (run.watch.over() or "")


def test_a_short_pause_is_not_named(run: Run, process: subprocess.Popen[bytes]) -> None:
    run.pulse_of(process, 1)
    for _ in range(3):
        stopped(process)
        assert run.looks(4) == [([], [])] * 4
        goes_on(process)
        assert run.look() == ([], [])


def test_a_rank_that_is_stopped_before_its_first_sign(
    run: Run, process: subprocess.Popen[bytes]
) -> None:
    run.watch.pids = {3: process.pid}
    stopped(process)
    assert (["rank 3 stopped"], []) in run.looks(10)


def test_the_launcher_is_named_and_ends_nothing(run: Run, process: subprocess.Popen[bytes]) -> None:
    run.watch.launcher = process.pid
    stopped(process)
    run.pulse(0)
    assert (["the launcher stopped"], []) in run.looks(10, 0)
    assert not run.watch.blocking


def test_a_stopped_process_of_a_rank(run: Run, process: subprocess.Popen[bytes]) -> None:
    """It blocks the run where the rank waits for it, and then for as long as the rank would
    wait.
    """
    child = {"name": "engine", "pid": process.pid}
    stopped(process)
    run.pulse(0, children=[child])
    assert (["engine stopped"], []) in run.looks(10)
    assert not run.watch.blocking
    run.pulse(0, children=[child], waits=WAITS, age_s=WAITS["limit_s"])
    run.look()
    assert str(run.watch.blocking[0]).endswith("; rank 0 waits for it")
    assert run.watch.over() is None
    run.pulse(0, children=[child], waits=WAITS, age_s=WAITS["limit_s"] + MARGIN_S)
    run.look()
    assert "raise sampler.request_timeout_s" in (run.watch.over() or "")


def test_silence_is_named_though_nothing_is_seen_to_be_stopped(run: Run) -> None:
    run.pulse(0)
    run.pulse(1, host="node7")
    run.look()
    found = []
    for _ in range(int(SILENT_S) + 5):
        run.pulse(0)
        found += run.look()[0]
    assert found == ["rank 1 silent"]
    run.pulse(1, host="node7")
    assert run.look()[1] == ["rank 1 silent"]


def test_a_rank_that_has_said_its_last_word_is_not_missed(run: Run) -> None:
    run.pulse(0)
    run.pulse(1, host="node7", ended=True)
    for _ in range(50):
        run.pulse(0)
        assert run.look() == ([], [])


@pytest.mark.fault(
    "a rank does not come to where the others wait",
    "it is named with its stack, and not the others",
)
@pytest.mark.parametrize(
    "told", [{"meets": False}, {"entered": 6}], ids=["in no collective", "in an earlier phase"]
)
def test_who_does_not_arrive(run: Run, told: dict[str, Any]) -> None:
    for rank in range(3):
        run.pulse(rank, age_s=TIMEOUT_S, **(told if rank == 1 else {}))
    assert run.look() == (["rank 1 hangs"], [])
    assert run.watch.troubles[0].stack == ("file.py:1 of_rank_1",)


def test_where_nobody_can_be_told_apart_all_are_named(run: Run) -> None:
    for rank in range(2):
        run.pulse(rank, age_s=TIMEOUT_S)
    assert run.look()[0] == ["rank 0 hangs", "rank 1 hangs"]


def test_the_engine_that_is_waited_for_is_named_and_has_its_own_timeout(run: Run) -> None:
    children = [{"name": "engine", "pid": None}, {"name": "reward worker 0", "pid": None}]
    for age_s, named in (
        (WAITS["limit_s"] + MARGIN_S - 2, []),
        (WAITS["limit_s"] + MARGIN_S, ["engine hangs"]),
    ):
        run.pulse(0, phase="rollout", age_s=age_s, waits=WAITS, children=children)
        run.pulse(1, phase="rollout", age_s=age_s)
        assert run.look()[0] == named
        assert bool(run.watch.over()) is bool(named)
    assert "raise sampler.request_timeout_s" in (run.watch.over() or "")


def test_a_run_without_progress_is_over(run: Run) -> None:
    for age_s, over in ((TIMEOUT_S - 2, False), (TIMEOUT_S, True)):
        run.pulse(0, age_s=age_s)
        run.look()
        assert bool(run.watch.over()) is over
    assert "raise run.hang_timeout_s=600" in str(run.watch.over())


def test_a_run_that_moves_is_not_over(run: Run, process: subprocess.Popen[bytes]) -> None:
    stopped(process)
    run.pulse_of(process, 1, age_s=1e6)
    for _ in range(20):
        run.pulse(0)
        run.look()
    assert run.watch.blocking
    assert run.watch.over() is None


@pytest.mark.fault(
    "a whole run is suspended for an hour, the one that watches it too", "nobody is accused of it"
)
def test_who_slept_as_well_accuses_nobody(run: Run) -> None:
    run.pulse(0)
    run.look()
    assert run.look(seconds=3600) == ([], [])


def test_the_lowest_rank_that_lives_looks(run: Run) -> None:
    for rank in range(3):
        run.pulse(rank, age_s=TIMEOUT_S, meets=rank != 2)
    assert run.look(1) == ([], [])
    assert run.look(0) == (["rank 2 hangs"], [])
    fresh = Run(run.folder / "other")
    found = []
    fresh.pulse(0)
    for _ in range(int(SILENT_S) + 5):
        fresh.pulse(1)
        found += fresh.look(1)[0]
    assert found == ["rank 0 silent"]


def test_a_higher_rank_looks_while_the_lowest_is_stopped(
    run: Run, process: subprocess.Popen[bytes]
) -> None:
    run.pulse_of(process, 0)
    run.pulse(1)
    stopped(process)
    assert run.looks(10, 1).count((["rank 0 stopped"], [])) == 1
    goes_on(process)
    run.pulse_of(process, 0)
    assert run.look(1) == ([], ["rank 0 stopped"])
    assert run.look(1) == ([], [])


def test_torn_and_foreign_files_are_passed_over(run: Run) -> None:
    run.pulse(0)
    file_of(run.folder, 1).write_text('{"rank": 1, "bea')
    file_of(run.folder, 2).write_text("")
    assert run.look() == ([], [])


def test_it_is_said_once_on_the_screen_in_the_log_and_in_the_status(
    run: Run, process: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    (run.folder / "logs" / "attempt_1").mkdir()
    mark_status(run.folder, "running")
    guard = Guard(run.watch)
    stopped(process)
    for _ in range(10):
        run.now += 1
        run.pulse_of(process, 0)
        guard.look()
    stuck = read_status(run.folder)["stuck"]
    assert (stuck["process"], stuck["how"], stuck["phase"]) == ("rank 0", "stopped", "update")
    goes_on(process)
    run.now += 1
    guard.look()
    assert read_status(run.folder)["stuck"] is None
    said = capsys.readouterr().out
    assert (said.count("is stopped"), said.count("goes on after")) == (1, 1)
    assert (RunDir(run.folder).logs / "driver.log").read_text() == said


def test_who_goes_on_elsewhere(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.folder / "logs" / "attempt_1").mkdir()
    guard = Guard(run.watch)
    far = Trouble("silent", "rank 5", 2**22 + 1, "node3", "update", 41.0, 5, blocks=True)
    run.watch.look = lambda rank=None: ([], [far])  # type: ignore[method-assign]
    guard.look()
    assert "rank 5 (process 4194305) goes on after 41 s" in capsys.readouterr().out


COMPILES = """
import time
from compiled_kernel import compile_here
compile_here()
print("ready", flush=True)
time.sleep(1000)
"""
SHOWS = """
import time
from megatron_rl.processes.stacks import show_on_request
show_on_request()
def waits_here():
    print("ready", flush=True)
    time.sleep(1000)
waits_here()
"""


def test_a_process_shows_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / LOCK).touch()
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", SHOWS], env=env, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
        assert "in waits_here" in ask(one.pid, tmp_path)
        assert ask(one.pid, tmp_path).count("in waits_here") == 1
        one.kill()


def test_a_process_that_does_not_listen_is_left_alone(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    assert ask(process.pid, tmp_path) == ""
    assert process.poll() is None


def test_a_process_whose_compiler_takes_the_signal_is_left_alone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMPILES], cwd=Path(__file__).parent, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"ready\n"
        assert ask(one.pid, tmp_path) == ""
        assert one.poll() is None
        one.kill()
