"""Starting and ending the ranks: which failure is reported, and which signals reach whom."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_rl import launch
from megatron_rl.config.schema import Config, LearnerSection, RunSection
from megatron_rl.runs.run_dir import read_status

SECOND_FAILS = """#!/bin/sh
if [ "$RANK" = 1 ]; then echo "ValueError: a bad shard" >&2; exit 1; fi
sleep 0.3
echo "RuntimeError: Connection closed by peer [127.0.0.1]:1" >&2
exit 1
"""
SIGNALLED = """
import os, signal, sys, types
from pathlib import Path
from megatron_rl.config.schema import Config
import megatron_rl.rank as rank
def train(*_):
    os.kill(os.getpid(), signal.SIGUSR1)
    os.kill(os.getpid(), signal.SIGINT)
    print("went on")
sys.modules["megatron_rl.learner"] = types.SimpleNamespace(host=None)
sys.modules["megatron_rl.train"] = types.SimpleNamespace(train=train)
rank.run_rank(Config(), Path("nowhere"))
"""


@pytest.fixture
def handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_rank_that_failed_by_itself_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(SECOND_FAILS)
    stand_in.chmod(0o755)
    monkeypatch.setattr(launch.sys, "executable", str(stand_in))
    config = Config(run=RunSection(name="run", root=str(tmp_path)), learner=LearnerSection(tensor_parallel=2))
    assert launch.launch(config) == 1
    assert read_status(tmp_path / "run")["state"] == "failed"
    assert read_status(tmp_path / "run")["reason"] == "rank 1: ValueError: a bad shard"
    said = capsys.readouterr().err
    assert "rank 1 failed" in said
    assert "a bad shard" in said


def test_a_lost_connection_is_not_a_cause() -> None:
    lost = "RuntimeError: Connection closed by peer"
    assert launch.first_cause({0: lost, 2: "killed"}) == 2
    assert launch.first_cause({0: "ValueError", 1: lost}) == 0
    assert launch.first_cause({1: lost, 2: lost}) == 1
    assert launch.first_cause({}) == 0


def test_signals_to_every_task_leave_the_followers_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGNALLED],
        env={**os.environ, "RANK": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr
