"""Rollouts ahead of the learner, and what happens in the middle of the overlap."""

import signal
import time

import kills
import pytest
from box import Box

from megatron_rl.checkpoint.checkpoints import steps

SECONDS = 600
AHEAD = (
    "rollout.max_staleness=2",
    "rollout.in_flight=interrupt",
    "checkpoint.every=2",
    "checkpoint.keep_last=2",
)


@pytest.mark.fault(
    "an engine or a server dies ahead of the learner",
    "it comes back, and no prompt is lost or doubled",
)
def test_a_killed_engine(box: Box) -> None:
    box.begin(*AHEAD, recipe="quickstart_fleet.yaml", steps=4)
    for wait_s in (0.0, 0.3):  # at any point of a step
        time.sleep(wait_s)
        box.processes("megatron_rl.engine.child")[0].kill()
        box.goes_on(5)
    kills.whole(box)
    assert sum(line.get("rollout/restarts", 0) for line in box.metrics()) >= 2


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "each kind of process is killed (SIGKILL) ahead of the learner, then all",
    "resumed, no prompt is lost or doubled",
)
def test_every_kind_of_process(box: Box) -> None:
    box.reward()
    more = ("rollout.max_staleness=1", "rollout.in_flight=interrupt")
    goes_on = None
    for line, victim in enumerate(
        ("engine", "reward worker", "rank 1", "launcher", "rank 0", "everything"), 2
    ):
        goes_on = kills.strike(box, kills.Moment(victim, line, 0.3), goes_on, more)
        assert bool(goes_on) == (victim in kills.REPLACED), box.screen
    assert box.train(*kills.RECIPE, *more).wait(SECONDS) == 0, box.screen
    assert not kills.miscounted(box.run)
    assert not kills.too_old(box.run, 1)


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "USR1, TERM or Ctrl-C ahead of the learner",
    "what was trained is kept, and the run goes on from there",
)
def test_asked_to_stop(box: Box) -> None:
    step = 0
    resumed = "run.if_exists=resume"
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        after = step + 3
        run = box.begin(*AHEAD, resumed, steps=after + 1)
        run.send_signal(number)
        run.wait(SECONDS)
        box.until_over(60)
        assert box.status()["state"] == "stopped", box.status()
        step = box.status()["step"]
        kept = max(steps(box.run / "checkpoints"))
        assert step >= after
        assert kept - step in (0, 1), (
            "an update that was under way is kept, its step ends when the run goes on"
        )
        assert not kills.miscounted(box.run, kept)
    more = (resumed, f"run.steps={step + 3}", "run.resume_allow=[run.steps]")
    assert box.train(*AHEAD, *more).wait(SECONDS) == 0, box.screen
    assert not kills.miscounted(box.run, step + 3)
    assert not kills.too_old(box.run, 2)
