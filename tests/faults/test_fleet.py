"""Fleets of real servers whose processes are stopped, and servers started by hand."""

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from box import MEGATRON_RL, ROOT, Box, wait_for

from megatron_rl.processes.process import free_port

pytestmark = pytest.mark.timeout(1800)
START_S, STEP_S = 600, 300  # two engines may compile one after the other
KEY = "0123456789abcdef" * 2
RECIPE = str(ROOT / "recipes" / "quickstart_fleet.yaml")


def engines(box: Box) -> list[psutil.Process]:
    """Processes of servers, each with its engine, in their order."""
    return sorted(box.processes("megatron_rl.engine.server"), key=lambda one: one.create_time())


def workers(server: psutil.Process) -> list[psutil.Process]:
    """Those of a larger engine. They write over their environment, by which the box knows its processes."""
    return [one for one in server.children(recursive=True) if "Worker_TP" in " ".join(one.cmdline())]


def running_fleet(box: Box, steps: int, *more: str) -> subprocess.Popen:
    run = box.train(f"run.steps={steps}", "sampler.request_timeout_s=600", *more, recipe="quickstart_fleet.yaml")
    wait_for(lambda: box.steps() >= 2 or run.poll() is not None, START_S, "two steps")
    assert run.poll() is None, box.screen
    return run


@pytest.mark.fault(
    "a worker of a fleet's server is stopped (SIGSTOP)", "three looks; the other server answers; it starts again"
)
def test_a_stopped_engine(box: Box) -> None:
    run = running_fleet(box, 1000, "sampler.tensor_parallel=2")
    victim = workers(engines(box)[0])[0]
    victim.suspend()
    before = box.steps()
    wait_for(lambda: "is out: did not answer 3 times in a row" in box.screen, STEP_S, "the screen says that it is out")
    assert "is slow to answer" in box.screen
    assert "is stopped" in box.screen
    wait_for(lambda: box.steps() >= before + 2, STEP_S, "the other server answers")
    wait_for(lambda: "is back with policy version" in box.screen, START_S, "it starts again")
    run.send_signal(signal.SIGUSR1)
    assert run.wait(STEP_S) == 0, box.screen
    assert "restarts: 2" not in box.screen


@pytest.mark.fault("a fleet's server pauses for 8 s", "nothing is lost, nothing starts again")
def test_a_pause(box: Box) -> None:
    run = running_fleet(box, 1000)
    servers = engines(box)
    for server in servers:
        server.suspend()
        time.sleep(8)
        server.resume()
        before = box.steps()
        wait_for(lambda at=before: box.steps() >= at + 2, STEP_S, "steps go on")
    assert " is out: " not in box.screen
    assert {one.pid for one in servers} <= {one.pid for one in engines(box)}
    run.send_signal(signal.SIGUSR1)
    assert run.wait(STEP_S) == 0, box.screen


def serve(box: Box, *words: str, port: int | None = None) -> tuple[subprocess.Popen, int]:
    """Who started a server, with room for 1024 files, and the port of the server, once it is ready."""
    port = port or free_port()
    box.env["MEGATRON_RL_FLEET_KEY"] = KEY
    limit = "import resource, subprocess, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024)); "
    starter = [sys.executable, "-c", limit + "sys.exit(subprocess.call(sys.argv[1:]))"]
    with served(box).open("w") as log:
        process = box.launch([*starter, *MEGATRON_RL, "serve", RECIPE, "--port", str(port), *words], stdout=log)
    wait_for(lambda: "ready: " in served(box).read_text() or process.poll() is not None, START_S, "it is ready")
    assert process.poll() is None, served(box).read_text()
    return process, port


def served(box: Box) -> Path:
    return box.folder / "serve.log"


def ask(port: int, key: str = KEY, path: str = "/health") -> int:
    """The status of an answer; with an empty key nothing is said of one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.fault("1200 half-open connections to a server of 1024 files, and no key", "its owner alone is answered")
def test_half_open_connections(box: Box) -> None:
    _, port = serve(box, "--format", "int8")
    assert "Route:" not in served(box).read_text()
    held = []
    for _ in range(1200):
        one = socket.create_connection(("127.0.0.1", port), 60)
        try:
            one.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: ")
        except OSError:
            pass  # cut off already
        held.append(one)
    assert [ask(port) for _ in range(20)] == [200] * 20
    paths = (
        "/health",
        "/engine",
        "/v1/models",
        "/metrics",
        "/docs",
        "/openapi.json",
        "/collective_rpc",
        "/",
        "/nothing",
    )
    assert {ask(port, key, path) for key in ("", "wrong", KEY[:-1]) for path in paths} == {401}
    assert {ask(port, path=path) for path in paths[1:]} == {404}, "there is /health, and the conversation at /engine"
    for one in held:
        one.close()


@pytest.mark.fault("whoever started `serve` is killed", "the server ends and leaves nothing")
def test_a_server_ends_with_its_starter(box: Box) -> None:
    starter, _ = serve(box)
    mine = box.processes()
    assert engines(box)
    starter.kill()
    wait_for(lambda: not any(map(alive, mine)), 60, "all of it is gone")
    assert not list(box.tmp.glob("megatron-rl-*"))


@pytest.mark.fault("`serve` itself is killed (SIGKILL)", "its server ends")
def test_a_killed_serve(box: Box) -> None:
    serve(box)
    mine = box.processes()
    assert engines(box)
    (front,) = [one for one in mine if one.cmdline()[1:4] == ["-m", "megatron_rl.cli", "serve"]]
    front.kill()
    wait_for(lambda: not any(map(alive, mine)), 60, "all of it is gone")


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.fault(
    "a server given by address is killed and started again",
    "the other one answers meanwhile; it is brought up to date and answers again",
)
def test_a_given_server_comes_back(box: Box) -> None:
    starter, port = serve(box)
    run = box.train(
        "run.steps=1000", f'sampler.fleet.addresses=["http://127.0.0.1:{port}"]', "sampler.fleet.replicas=1"
    )
    wait_for(lambda: box.steps() >= 2 or run.poll() is not None, START_S, "two steps")
    starter.kill()
    wait_for(lambda: "is out: " in box.screen, STEP_S, "the screen says that it is out")
    before = box.steps()
    wait_for(lambda: box.steps() >= before + 2 or run.poll() is not None, STEP_S, "the other one answers")
    serve(box, port=port)
    wait_for(lambda: "is back with policy version" in box.screen or run.poll() is not None, START_S, "it is back")
    before = box.steps()
    wait_for(lambda: box.steps() >= before + 2 or run.poll() is not None, STEP_S, "steps go on")
    run.send_signal(signal.SIGUSR1)
    assert run.wait(STEP_S) == 0, box.screen
