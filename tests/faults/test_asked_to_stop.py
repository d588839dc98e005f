"""USR1, "finish the step, then stop", at every moment of a run on this machine."""

import signal
import time

import pytest
from box import Box, wait_for

START_S = 300
SETTINGS = ("run.steps=100000", "log.export=true")


@pytest.mark.fault("USR1 at some moment of a run, its start included", "the step is finished, the model exported")
@pytest.mark.parametrize("moment", ["at once", "a rank is there", "the engine starts", "the second step"])
def test_usr1_is_obeyed(box: Box, moment: str) -> None:
    launcher = box.train(*SETTINGS)
    if moment == "at once":
        wait_for(lambda: box.processes("megatron_rl.cli"), 60, "the launcher")
        time.sleep(0.5)  # what Python needs before it runs anything
    elif moment == "a rank is there":
        wait_for(lambda: box.processes("megatron_rl.rank"), START_S, "a rank")
    elif moment == "the engine starts":
        wait_for(lambda: box.processes("megatron_rl.engine.child"), START_S, "an engine")
    else:
        wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    launcher.send_signal(signal.SIGUSR1)
    assert launcher.wait(START_S) == 0, box.screen
    assert box.steps() >= 2  # the start, and a step
    assert (box.run / "model" / "model.safetensors.index.json").exists()
    assert not list(box.tmp.iterdir())


@pytest.mark.fault("USR1 reaches every process of a run", "the engine and the rewards go on until the step is finished")
def test_usr1_to_everybody(box: Box) -> None:
    launcher = box.train(*SETTINGS)
    wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    for process in box.processes():
        process.send_signal(signal.SIGUSR1)
    assert launcher.wait(START_S) == 0, box.screen
    assert (box.run / "model" / "model.safetensors.index.json").exists()
