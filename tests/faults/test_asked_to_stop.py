"""USR1 ("finish the step, then stop"), TERM and Ctrl-C at every moment of a run on this machine."""

import re
import signal
import subprocess
from pathlib import Path

import pytest
from box import Box
from helpers import wait_for

from megatron_rl.checkpoint import checkpoints

pytestmark = pytest.mark.timeout(1800)
START_S = 300
SETTINGS = ("run.steps=100000", "checkpoint.export_hf=true")
ASKS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)
ENDS_WITH = {signal.SIGUSR1: 0, signal.SIGTERM: 143, signal.SIGINT: 130}
SLOW = """
import pathlib, time

def score(row, key, response):
    if pathlib.Path("slow").exists():
        pathlib.Path("begun").touch()
        time.sleep(1)
    return len(response) % 2
"""


def blocks(pid: int, number: signal.Signals) -> bool:
    (mask,) = re.findall(r"^SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.M)
    return bool(int(mask, 16) >> (number - 1) & 1)


def ended(box: Box, launcher: subprocess.Popen[str], number: signal.Signals) -> None:
    assert launcher.wait(START_S) == ENDS_WITH[number], box.screen
    assert box.status()["state"] == "stopped", box.status()
    assert number.name in box.status()["reason"]
    box.until_over()
    box.left_nothing()


@pytest.mark.fault(
    "USR1, TERM or Ctrl-C in the start of a run", "it ends within seconds, and its name is free"
)
@pytest.mark.parametrize("moment", ["a rank is there", "it answers"])
def test_the_start(box: Box, moment: str) -> None:
    for number in ASKS:
        asked_in_the_start(box, moment, number)
    assert box.train("run.steps=1").wait(START_S) == 0, box.screen


def asked_in_the_start(box: Box, moment: str, number: signal.Signals) -> None:
    launcher = box.train(*SETTINGS)
    wait_for(
        lambda: box.processes(
            "megatron_rl.rank" if moment == "a rank is there" else "megatron_rl.engine.child"
        )
    )
    if moment == "it answers":
        log = box.run / "logs" / "attempt_1" / "sampler.log"
        wait_for(
            lambda: log.exists() and "reset prefix cache" in log.read_text(),
            "an engine that answers",
        )
    launcher.send_signal(number)
    ended(box, launcher, number)
    assert box.steps() <= 1
    assert not checkpoints.steps(box.run / "checkpoints")


@pytest.mark.fault(
    "USR1 before the launcher can act on it", "it is kept, and the run ends in its start"
)
def test_at_once(box: Box) -> None:
    launcher = box.train(*SETTINGS)
    wait_for(lambda: box.processes("megatron_rl.cli"), "the launcher")
    wait_for(lambda: blocks(launcher.pid, signal.SIGUSR1), "it cannot act on it yet")
    launcher.send_signal(signal.SIGUSR1)
    ended(box, launcher, signal.SIGUSR1)


@pytest.mark.fault(
    "USR1, TERM or Ctrl-C in a short step", "it is finished and kept, the model exported"
)
@pytest.mark.parametrize("number", ASKS[:2], ids=lambda number: number.name)
def test_a_short_step(box: Box, number: signal.Signals) -> None:
    launcher = box.begin(*SETTINGS, "checkpoint.every=1", steps=4)
    launcher.send_signal(number)
    ended(box, launcher, number)
    status = box.status()
    assert "the step is finished" in status["stopping"]["said"], status
    assert f"after step {status['step']} of 100000" in status["reason"]
    assert checkpoints.steps(box.run / "checkpoints")[0] == status["step"] == box.steps() - 1
    assert (box.run / "model" / "model.safetensors.index.json").exists()


@pytest.mark.fault(
    "TERM or Ctrl-C while slow rewards are waited for",
    "the step is given up, the one before is kept",
)
def test_a_long_step(box: Box) -> None:
    number = signal.SIGTERM
    (box.folder / "slow.py").write_text(SLOW)
    # 256 s
    settings = (
        "reward.name=slow:score",
        "reward.workers=1",
        "rollout.prompts_per_step=64",
    )
    launcher = box.begin(*SETTINGS, *settings, steps=2)
    (box.folder / "slow").touch()
    wait_for((box.folder / "begun").exists, "a slow reward")
    launcher.send_signal(number)
    wait_for(lambda: (box.status().get("stopping") or {}).get("said"), "that it is noticed")
    ended(box, launcher, number)
    status = box.status()
    made = box.steps() - 1
    assert f"of step {made + 1}" in status["reason"], status
    assert f"the state after step {made} is kept" in status["reason"]
    assert checkpoints.steps(box.run / "checkpoints") == [made]
