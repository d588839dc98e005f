"""A process of a whole run hangs, or stays stopped (SIGSTOP): it is named, and the run ends."""

import os
import subprocess

import pytest
from box import Box
from helpers import wait_for

from megatron_rl.sampler.supervisor import MAX_RESTARTS

pytestmark = pytest.mark.timeout(1800)
START_S = 600
STEP_S = 300
NAMED_S = 60  # the promise
RECIPE = (
    "model.init=random",
    "model.path=data/toy/model",
    "reward.name=chance:score",
    "checkpoint.every=0",
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


def log(box: Box) -> str:
    return (box.run / "logs" / "attempt_1" / "driver.log").read_text()


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
def test_rank_0_stays_stopped(box: Box) -> None:
    process = begun(box, "run.hang_timeout_s=20", "sampler.request_timeout_s=20")
    box.rank(0).suspend()
    assert process.wait(STEP_S) == 1, box.screen
    ended(box, "rank 0", "")


@pytest.mark.fault(
    "the engine of a whole run stays stopped",
    "ended after three looks and started again; after three times the run ends, and says why",
)
def test_an_engine_that_stays_stopped(box: Box) -> None:
    process = begun(box)
    for stop in range(MAX_RESTARTS + 1):
        one = box.processes("engine.child")[0]
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
