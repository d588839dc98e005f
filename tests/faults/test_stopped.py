"""Each kind of process of a whole run is stopped (SIGSTOP) and continued: it is named, and the run
ends well.
"""

import itertools
import os
import re
import signal
import subprocess
import time

import kills
import psutil
import pytest
from box import Box
from helpers import wait_for
from test_fleet import engines, running_fleet

from megatron_rl.sampler.supervisor import MAX_RESTARTS

pytestmark = pytest.mark.timeout(1800)
START_S = 600
STEP_S = 300
NAMED_S = 60  # the promise
RECIPE = (
    "model.init=random",
    "model.path=data/toy/model",
    "reward.name=chance:score",
    "checkpoint.minutes=0",
)
RECIPE += ("sync.probe_budget=1000",)
# In the place of a defect of a rank: from a moment on, its updates do not return.
SLEEPS = """
import os, sys, threading, time


def forget_to_come(*_):
    time.sleep(1000)


def wait():
    while not os.path.exists(os.environ["SLEEPS_FROM"]):
        time.sleep(0.2)
    sys.modules["megatron_rl.learner.learner"].Learner.update = forget_to_come


if os.environ.get("RANK") == "1" and "SLEEPS_FROM" in os.environ:
    threading.Thread(target=wait, daemon=True).start()
"""


def begun(box: Box, *overrides: str) -> subprocess.Popen[str]:
    box.reward(0)
    return box.begin(*RECIPE, *overrides)


def victim(box: Box, kind: str, launcher: int) -> psutil.Process:
    if kind == "the launcher":
        return psutil.Process(launcher)
    if kind.startswith("rank"):
        return box.rank(int(kind[-1]))
    return box.processes({"engine": "engine.child", "reward worker 0": "rewards.worker"}[kind])[0]


def log(box: Box) -> str:
    return (box.run / "logs" / "attempt_1" / "driver.log").read_text()


def ends_well(box: Box, process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGUSR1)
    assert process.wait(STEP_S) == 0, box.screen
    assert box.status()["state"] == "stopped"
    assert box.status()["stuck"] is None
    box.until_over()


KINDS = ["rank 1", "rank 0", "engine", "reward worker 0", "the launcher"]
TRIES = int(os.environ.get("TRIES", "1"))  # of each kind


@pytest.mark.fault(
    "any process of a whole run is stopped and continued", "named within 60 s; the run ends well"
)
@pytest.mark.parametrize(
    "more", [(), ("rollout.ahead=1", "rollout.in_flight=continue")], ids=["in turn", "ahead"]
)
def test_every_kind_of_process(box: Box, more: tuple[str, ...]) -> None:
    process = begun(box, *more)
    for attempt, kind in itertools.product(range(TRIES), KINDS):
        one = victim(box, kind, process.pid)
        start = time.monotonic()
        one.suspend()
        name = f"stuck    {kind} (process {one.pid} on "
        wait_for(lambda name=name, n=attempt: log(box).count(name) > n, f"{kind} is named", NAMED_S)
        print(f"{kind}: named after {time.monotonic() - start:.0f} s", flush=True)
        stuck = lambda: (box.status().get("stuck") or {}).get("process")  # noqa: E731
        wait_for(
            lambda stuck=stuck, kind=kind: stuck() == kind, f"status.json names {kind}", NAMED_S
        )
        one.resume()
        box.goes_on()
        wait_for(lambda: box.status().get("stuck") is None, "nobody is stuck any more", NAMED_S)
        assert log(box).count(name) == attempt + 1
    ends_well(box, process)
    assert not kills.miscounted(box.run, box.status()["step"])


@pytest.mark.fault(
    "one of two engines of a whole run is stopped",
    "it is named; it is started again; the run ends well",
)
def test_a_stopped_server(box: Box) -> None:
    process = running_fleet(box)
    server = engines(box)[0]
    server.suspend()
    named = re.compile(rf"stuck    engine 0 \(\w+\) \(process {server.pid} on ")
    wait_for(lambda: named.search(log(box)), "it is named", NAMED_S)
    wait_for(lambda: "is back with policy version" in box.screen, "it starts again", START_S)
    assert engines(box)
    ends_well(box, process)


@pytest.mark.fault(
    "a rank of a whole run hangs in an update", "it alone is named, with its stack; the run ends"
)
def test_a_stuck_rank(box: Box) -> None:
    (box.folder / "sitecustomize.py").write_text(SLEEPS)
    marker = box.folder / "sleep now"
    paths = [str(box.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    box.env |= {"PYTHONPATH": os.pathsep.join(paths), "SLEEPS_FROM": str(marker)}
    process = begun(box, "run.hang_timeout_s=45")
    marker.touch()
    assert process.wait(STEP_S) == 1
    assert "stuck    rank 1" in log(box)
    assert "in `update`" in log(box)
    assert "forget_to_come" in (box.run / "logs" / "attempt_1" / "rank_1.log").read_text()
    assert "stuck    rank 0" not in log(box)
    ended(box, "rank 1", "run.hang_timeout_s")


@pytest.mark.fault(
    "a rank of a whole run stays stopped", "the run ends in time: it is named last; nothing is left"
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_stopped(box: Box, rank: int) -> None:
    process = begun(box, "run.hang_timeout_s=20", "sampler.request_timeout_s=20")
    victim(box, f"rank {rank}", process.pid).suspend()
    assert process.wait(STEP_S) == 1, box.screen
    ended(box, f"rank {rank}", "run.hang_timeout_s" if rank else "")


@pytest.mark.fault(
    "the engine of a whole run stays stopped",
    "ended after three looks and started again; after three times the run ends, and says why",
)
def test_an_engine_that_stays_stopped(box: Box) -> None:
    process = begun(box)
    for stop in range(MAX_RESTARTS + 1):
        one = victim(box, "engine", process.pid)
        one.suspend()
        wait_for(lambda one=one: not one.is_running(), "it is ended", STEP_S)
        if stop < MAX_RESTARTS:
            back = lambda n=stop + 1: box.screen.count("is back with policy version") >= n  # noqa: E731
            wait_for(back, "it is started again", START_S)
            box.goes_on()
    assert process.wait(STEP_S) == 1, box.screen
    assert f"given up after {MAX_RESTARTS} restarts" in box.status()["reason"]
    assert "is stopped" in box.status()["reason"]
    box.until_over()


def ended(box: Box, who: str, key: str) -> None:
    status = box.status()
    assert status["state"] == "failed"
    assert status["reason"].startswith(f"{who} (process ")
    assert key in status["reason"]
    assert status["stuck"]["process"] == who
    assert box.screen.rstrip().splitlines()[-1] == f"failed: {status['reason']}"
    box.until_over()
    assert not list(box.tmp.glob("megatron-rl-run-*"))
