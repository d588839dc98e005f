"""Several engines whose processes are stopped, and servers started by hand."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from box import MEGATRON_RL, ROOT, Box
from helpers import wait_for

from megatron_rl.processes.process import free_port, state_of

pytestmark = pytest.mark.timeout(1800)
# two engines may compile one after the other
START_S = 600
STEP_S = 300
KEY = "0123456789abcdef" * 2
# these tests may themselves run under nohup, which its children inherit
STARTER = (
    "import signal, subprocess, sys; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
    "sys.exit(subprocess.call(sys.argv[1:]))"
)
RECIPE = str(ROOT / "recipes" / "quickstart_fleet.yaml")


def engines(box: Box, kind: str = "child") -> list[psutil.Process]:
    """Processes of engines, in their order."""
    return sorted(box.processes(f"megatron_rl.engine.{kind}"), key=lambda one: one.create_time())


def running_fleet(box: Box, *more: str) -> subprocess.Popen[str]:
    return box.begin(
        "sampler.request_timeout_s=600", *more, recipe="quickstart_fleet.yaml", steps=2
    )


@pytest.mark.fault(
    "one of two engines is stopped (SIGSTOP)",
    "three looks; the other engine answers; it starts again",
)
def test_a_stopped_engine(box: Box) -> None:
    run = running_fleet(box)
    engines(box)[0].suspend()
    before = box.steps()
    wait_for(
        lambda: "is unavailable: failed 3 health checks in a row" in box.screen,
        "the screen says that it is out",
    )
    assert "is slow to reply" in box.screen
    assert "is stopped" in box.screen
    box.until_steps(before + 2)  # the other engine answers
    box.until(lambda: "is back with policy version" in box.screen, "it starts again")
    ends_well(box, run)
    assert "restarts: 2" not in box.screen


def ends_well(box: Box, run: subprocess.Popen[str]) -> None:
    run.send_signal(signal.SIGUSR1)
    assert run.wait(STEP_S) == 0, box.screen


def serve(box: Box, port: int | None = None) -> tuple[subprocess.Popen[str], int]:
    """Start a server from another process; return that and its port once it is ready."""
    port = port or free_port()
    box.env["MEGATRON_RL_FLEET_KEY"] = KEY
    starter = [sys.executable, "-c", STARTER]
    with served(box).open("w") as log:
        process = box.launch(
            [*starter, *MEGATRON_RL, "serve", RECIPE, "--port", str(port)], stdout=log
        )
    wait_for(
        lambda: "ready: " in served(box).read_text() or process.poll() is not None,
        "it is ready",
        START_S,
    )
    assert process.poll() is None, served(box).read_text()
    return process, port


def served(box: Box) -> Path:
    return box.folder / "serve.log"


@pytest.mark.fault("the parent of `serve` is killed", "the server ends and leaves nothing")
def test_a_server_ends_with_its_starter(box: Box) -> None:
    starter, _ = serve(box)
    mine = box.processes()
    assert engines(box, "server")
    starter.kill()
    all_gone(mine)
    assert not list(box.tmp.glob("megatron-rl-*"))


def all_gone(processes: list[psutil.Process]) -> None:
    wait_for(
        lambda: all(state_of(one.pid) in ("", "Z") for one in processes), "all of it is gone", 60
    )


@pytest.mark.fault(
    "a server given by address is killed and started again",
    "it is looked for, brought up to date and answers again",
)
def test_a_given_server_comes_back(box: Box) -> None:
    starter, port = serve(box)
    run = box.begin(f'sampler.addresses=["http://127.0.0.1:{port}"]', steps=2)
    starter.kill()
    wait_for(lambda: "is unavailable: " in box.screen, "the screen reports it as unavailable")
    serve(box, port=port)
    box.until(lambda: "is back with policy version" in box.screen, "it is back")
    box.goes_on()
    ends_well(box, run)
