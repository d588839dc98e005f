"""status.json has two writers at a time: the driver, and the launcher that looks after it."""

import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.tracking import status
from megatron_rl.tracking.status import beat, mark_status, mark_stuck, read_status

DRIVER = """
import sys
from pathlib import Path
from megatron_rl.tracking import status
from megatron_rl.tracking.status import beat
status.WAIT_S = 600.0
while sys.stdin.readline():
    for _ in range(100):
        beat(Path(sys.argv[1]), step=1)
    print("done", flush=True)
"""
STUCK = {"how": "slow", "process": "reward worker 0"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    mark_status(tmp_path, "running", stuck=None)
    return tmp_path


def test_neither_takes_back_what_the_other_has_said(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "WAIT_S", 600.0)  # both are slow on a busy machine
    command = [sys.executable, "-c", DRIVER, str(run)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdin and driver.stdout
        driver.stdin.write("go\n")
        driver.stdin.flush()
        os.set_blocking(driver.stdout.fileno(), False)
        while not driver.stdout.readline():
            mark_stuck(run, STUCK)
            time.sleep(0.001)
            assert read_status(run)["stuck"] == STUCK
            mark_stuck(run, None)
            time.sleep(0.001)
            assert read_status(run)["stuck"] is None
        driver.stdin.close()
    assert read_status(run)["step"] == 1


def test_a_stopped_writer_does_not_block_readers(run: Path) -> None:
    folder = os.open(run, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    mark_stuck(run, STUCK)
    assert read_status(run)["stuck"] == STUCK
    os.close(folder)


@pytest.mark.parametrize(
    ("state", "left"),
    [
        ("finished", None),
        ("stopped", None),
        ("failed", STUCK),
    ],
)
def test_a_finished_run_names_no_blocking_process(
    run: Path, state: str, left: dict[str, str] | None
) -> None:
    mark_stuck(run, STUCK)
    beat(run)
    mark_status(run, state, "why")
    assert read_status(run)["stuck"] == left
