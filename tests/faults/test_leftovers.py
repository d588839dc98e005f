"""What is left of a run, in the temporary folder and in shared memory: nothing, or nothing after the next start."""

import ctypes
import os
import signal
import time
from pathlib import Path

import pytest
from box import ROOT, Box, wait_for

from megatron_rl.processes.process import free_port

SHARED = Path("/dev/shm")
START_S = 300
FLEET = ("sampler.fleet.replicas=2", "run.steps=2")


@pytest.fixture(scope="module", autouse=True)
def own_shared_memory() -> None:
    """Others may work on this machine: from here on this process and its children have a /dev/shm of their own."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private = 0x20000, 0x40000 | 0x4000  # of everything below
    if os.geteuid() != 0 or libc.unshare(new_mounts) or libc.mount(None, b"/", None, private, None):
        pytest.skip("needs root")
    assert libc.mount(b"tmpfs", bytes(SHARED), b"tmpfs", 0, None) == 0, os.strerror(ctypes.get_errno())


def shared() -> list[str]:
    return sorted(path.name for path in SHARED.iterdir())


def below(box: Box) -> list[str]:
    return sorted(path.name for path in box.tmp.iterdir())


@pytest.mark.fault("a run with an engine of two workers is left alone", "nothing is left of it")
def test_a_clean_end_of_a_large_engine(box: Box) -> None:
    assert box.train("run.steps=1", "sampler.tensor_parallel=2").wait(START_S) == 0, box.screen
    assert below(box) == []
    assert shared() == []


@pytest.mark.fault("a run with a fleet is left alone", "nothing is left of it")
def test_a_clean_end_of_a_fleet(box: Box) -> None:
    assert box.train(*FLEET, recipe="quickstart_fleet.yaml").wait(START_S * 2) == 0, box.screen
    assert below(box) == []
    assert shared() == []


@pytest.mark.fault("kill -9 of the launcher in mid-run", "nobody lives on, and the next start clears the folders")
def test_a_killed_launcher(box: Box) -> None:
    launcher = box.train("run.steps=1000")
    wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    launcher.kill()
    wait_for(lambda: not box.processes(), START_S, "the end of all processes")
    assert box.train("run.steps=1", "run.if_exists=archive").wait(START_S) == 0, box.screen
    assert below(box) == []
    assert shared() == []


@pytest.mark.fault("kill -9 of rank 0 in mid-run", "the launcher clears the folders, those in shared memory too")
@pytest.mark.parametrize(
    "settings", [("log.wandb=offline", "sampler.tensor_parallel=2"), ("sampler.fleet.replicas=1",)]
)
def test_a_killed_driver(box: Box, settings: tuple[str, ...]) -> None:
    launcher = box.train("run.steps=1000", *settings)
    wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    os.kill(driver(box), signal.SIGKILL)
    assert launcher.wait(START_S) != 0
    wait_for(lambda: not box.processes(), START_S, "the end of all processes")
    assert below(box) == []
    assert shared() == []


@pytest.mark.fault("kill -9 of the launcher in a rank's first second", "no rank lives on")
@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.5])
def test_a_launcher_killed_while_ranks_start(box: Box, after_s: float) -> None:
    launcher = box.train("run.steps=1000", "learner.tensor_parallel=2")
    wait_for(lambda: box.processes("megatron_rl.rank"), START_S, "a rank")
    time.sleep(after_s)
    launcher.kill()
    wait_for(lambda: not box.processes(), START_S, "the end of all processes")


@pytest.mark.fault("kill -9 of `megatron-rl serve`", "its server ends, and the next start clears its folder")
def test_a_killed_server(box: Box) -> None:
    box.env["MEGATRON_RL_FLEET_KEY"] = "k" * 40
    serve = box.start("serve", str(ROOT / "recipes" / "quickstart.yaml"), "--port", str(free_port()))
    wait_for(lambda: box.processes("megatron_rl.engine.server"), START_S, "the server")
    wait_for(lambda: "ready: " in box.screen, START_S, "its engine")
    serve.kill()
    wait_for(lambda: not box.processes(), START_S, "the end of all processes")
    settings = ("run.steps=1", "rollout.samples_per_prompt=1")
    assert box.train(*settings, recipe="toy_sft.yaml").wait(START_S) == 0, box.screen
    assert below(box) == []


def driver(box: Box) -> int:
    return next(one.pid for one in box.processes("megatron_rl.rank") if one.environ().get("RANK") == "0")
