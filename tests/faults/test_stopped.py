"""A rank of a whole run hangs: it is named, and the run ends."""

import os

import pytest
from box import Box

STEP_S = 300
RECIPE = (
    "model.init=random",
    "model.path=data/toy/model",
    "reward.name=chance:score",
    "checkpoint.every=0",
    "sync.probe_budget=1000",
    "run.hang_timeout_s=45",
)
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


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "a rank of a whole run hangs in an update", "it alone is named, with its stack; the run ends"
)
def test_a_stuck_rank(box: Box) -> None:
    (box.folder / "sitecustomize.py").write_text(SLEEPS)
    marker = box.folder / "sleep now"
    paths = [str(box.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    box.env |= {"PYTHONPATH": os.pathsep.join(paths), "SLEEPS_FROM": str(marker)}
    box.reward(0)
    process = box.begin(*RECIPE)
    marker.touch()
    assert process.wait(STEP_S) == 1
    logs = box.run / "logs" / "attempt_1"
    log = (logs / "driver.log").read_text()
    assert "stuck: rank 1" in log
    assert "stuck: rank 0" not in log
    assert "forget_to_come" in (logs / "rank_1.log").read_text()
    status = box.status()
    assert status["state"] == "failed"
    assert "in `update`" in status["reason"]
    assert status["stuck"]["process"] == "rank 1"
    assert box.screen.rstrip().splitlines()[-1] == f"failed: {status['reason']}"
    box.until_over()
    assert not list(box.tmp.glob("megatron-rl-run-*"))
