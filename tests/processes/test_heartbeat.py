"""What is said of an engine that hangs or is busy."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from megatron_rl.processes import pulse
from megatron_rl.processes.process import Work, state_of, work_below
from megatron_rl.processes.pulse import Heartbeat


class Engine:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()

    async def ask(self):
        self.asked += 1
        return await self.answer


@contextmanager
def server(child: str) -> Iterator[int]:
    """A process with one child, which runs `child`, and has started."""
    inner = [sys.executable, "-c", f"import os, time; print(os.getpid(), flush=True)\n{child}"]
    outer = f"import subprocess; subprocess.call({inner!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", outer], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        pid = int(process.stdout.readline())
        while "sleep(100)" in child and state_of(pid) != "S":
            time.sleep(0.01)
        yield pid
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


@pytest.fixture(autouse=True)
def short_wait(monkeypatch) -> None:
    monkeypatch.setattr(pulse, "ANSWER_S", 0.6)


def look(child: str, during=lambda pid: None) -> tuple[int, dict]:
    async def main(pid: int):
        return await Heartbeat(Engine().ask, parent(pid)).look()

    with server(child) as pid:
        during(pid)
        return asyncio.run(main(pid))


@pytest.mark.fault("an engine neither answers nor works", "/health says so with 503")
def test_an_engine_that_only_waits_hangs():
    status, body = look("time.sleep(100)")
    assert status == 503
    assert "neither answers nor works" in body["error"]


@pytest.mark.fault("an engine's process is stopped", "/health names it with 503")
def test_a_stopped_process_is_named():
    status, body = look("while True: pass", lambda pid: os.kill(pid, signal.SIGSTOP))
    assert status == 503
    assert "is stopped" in body["error"]


@pytest.mark.fault(
    "an engine is busy, or waits for a lock, and does not answer", "/health says busy, with 200"
)
@pytest.mark.parametrize("work", ["pass", "time.sleep(0.02)"])
def test_an_engine_that_works_is_busy(work, monkeypatch):
    monkeypatch.setattr(pulse, "ANSWER_S", 3.0)  # it has a core within that
    assert look(f"while True: {work}") == (200, {"engine": "busy"})


def test_there_is_one_question_at_a_time_and_its_answer_counts():
    async def main() -> None:
        engine = Engine()
        heart = Heartbeat(engine.ask, os.getpid())
        await asyncio.gather(heart.look(), heart.look())
        assert engine.asked == 1
        engine.answer.set_result(None)
        assert await heart.look() == (200, {"engine": "answers"})
        engine.answer = asyncio.get_running_loop().create_future()
        engine.answer.set_exception(RuntimeError("the engine is dead"))
        status, body = await heart.look()
        assert (status, "the engine is dead" in body["error"]) == (503, True)
        assert engine.asked == 2

    asyncio.run(main())


def test_work_below_counts_children():
    with server("while True: pass") as pid:
        deadline = time.monotonic() + 60
        while work_below(parent(pid)).cpu_s < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert work_below(pid) == Work(0, 0, ())
