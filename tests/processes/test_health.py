"""Health of an engine: it answers, is busy, has failed, or is stopped."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable

import pytest
from helpers import wait_for

from megatron_rl.processes import health
from megatron_rl.processes.health import EngineHealth
from megatron_rl.processes.process import state_of


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def answers() -> None:
    pass


async def fails() -> None:
    raise RuntimeError("no memory")


def look(ask: Callable[[], Awaitable[None]]) -> tuple[int, dict[str, str]]:
    async def main() -> tuple[int, dict[str, str]]:
        return await EngineHealth(ask, os.getpid()).look()

    return asyncio.run(main())


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.2)


def test_an_engine_answers_has_failed_or_is_busy() -> None:
    assert look(answers) == (200, {"engine": "answers"})
    status, content = look(fails)
    assert (status, "no memory" in content["error"]) == (503, True)
    assert look(never) == (200, {"engine": "busy"})


@pytest.mark.fault("a process of a server's engine is stopped", "/health names it with 503")
def test_a_stopped_process_is_named() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        child.send_signal(signal.SIGSTOP)
        wait_for(lambda: state_of(child.pid) == "T")
        status, content = look(never)
        assert (status, str(child.pid) in content["error"]) == (503, True)
    finally:
        child.kill()
        child.wait()
