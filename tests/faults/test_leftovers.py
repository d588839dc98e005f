"""Leftovers of a run in the temporary folder and in shared memory: none, or none after the next
start.
"""

import ctypes
import os
from pathlib import Path

import pytest
from box import Box

SHARED = Path("/dev/shm")
START_S = 300
FLEET = ("sampler.engines=2", "run.steps=2")


@pytest.fixture(scope="module", autouse=True)
def own_shared_memory() -> None:
    """Others may work on this machine: from here on this process and its children have a /dev/shm
    of their own.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # of everything below
    new_mounts = 0x20000
    private = 0x40000 | 0x4000
    if os.geteuid() != 0 or libc.unshare(new_mounts) or libc.mount(None, b"/", None, private, None):
        pytest.skip("needs root")
    assert (
        libc.mount(
            b"tmpfs",
            bytes(SHARED),
            b"tmpfs",
            0,
            None,
        )
        == 0
    ), os.strerror(ctypes.get_errno())


def shared() -> list[str]:
    return sorted(path.name for path in SHARED.iterdir())


def left_nothing(box: Box) -> None:
    box.left_nothing()
    assert shared() == []


@pytest.mark.fault("a run with an engine of two workers is left alone", "nothing is left of it")
def test_a_clean_end_of_a_large_engine(box: Box) -> None:
    assert box.train("run.steps=1", "sampler.tensor_parallel=2").wait(START_S) == 0, box.screen
    left_nothing(box)


@pytest.mark.fault("a run with a fleet is left alone", "nothing is left of it")
def test_a_clean_end_of_a_fleet(box: Box) -> None:
    assert box.train(*FLEET, recipe="quickstart_fleet.yaml").wait(START_S * 2) == 0, box.screen
    left_nothing(box)


@pytest.mark.fault(
    "kill -9 of the launcher in mid-run",
    "no process survives, and the next start clears the folders",
)
def test_a_killed_launcher(box: Box) -> None:
    box.begin(steps=2).kill()
    box.until_over()
    assert box.train("run.steps=1", "run.if_exists=archive").wait(START_S) == 0, box.screen
    left_nothing(box)


@pytest.mark.fault(
    "kill -9 of rank 0 in mid-run", "the launcher clears the folders, those in shared memory too"
)
def test_a_killed_driver(box: Box) -> None:
    launcher = box.begin("log.wandb=offline", "sampler.tensor_parallel=2", steps=2)
    box.rank(0).kill()
    assert launcher.wait(START_S) != 0
    box.until_over()
    left_nothing(box)
