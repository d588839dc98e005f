"""What is left of a run, in the temporary folder and in shared memory: nothing, or nothing after the next start."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from box import Box, wait_for

SHARED = Path("/dev/shm")
START_S = 300
FLEET = ("sampler.fleet.replicas=2", "run.steps=2")


@pytest.fixture
def shared() -> Iterator[Callable[[], set[str]]]:
    """What has come into shared memory since; others may work beside the test, so that old names do not count."""
    before = {path.name for path in SHARED.iterdir()}
    yield lambda: {path.name for path in SHARED.iterdir()} - before


def below(box: Box) -> list[str]:
    return sorted(path.name for path in box.tmp.iterdir())


@pytest.mark.fault("a run with an engine of two workers is left alone", "nothing is left of it")
def test_a_clean_end_of_a_large_engine(box: Box, shared: Callable[[], set[str]]) -> None:
    assert box.train("run.steps=1", "sampler.tensor_parallel=2").wait(START_S) == 0, box.screen
    assert below(box) == []
    assert not {name for name in shared() if name.startswith(("psm_", "megatron-rl-"))}


@pytest.mark.fault("a run with a fleet is left alone", "nothing is left of it")
def test_a_clean_end_of_a_fleet(box: Box, shared: Callable[[], set[str]]) -> None:
    assert box.train(*FLEET, recipe="quickstart_fleet.yaml").wait(START_S * 2) == 0, box.screen
    assert below(box) == []
    assert not shared()


@pytest.mark.fault("kill -9 of the launcher in mid-run", "nobody lives on, and the next start clears the folders")
def test_a_killed_launcher(box: Box, shared: Callable[[], set[str]]) -> None:
    launcher = box.train("run.steps=1000")
    wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    launcher.kill()
    wait_for(lambda: not box.processes(), 30, "the end of all processes")
    assert box.train("run.steps=1", "run.if_exists=archive").wait(START_S) == 0, box.screen
    assert below(box) == []
    assert not {name for name in shared() if name.startswith("megatron-rl-")}


@pytest.mark.fault("kill -9 of rank 0 in mid-run", "the launcher clears the folders, those in shared memory too")
@pytest.mark.parametrize("settings", [(), ("sampler.tensor_parallel=2",), ("sampler.fleet.replicas=1",)])
def test_a_killed_driver(box: Box, shared: Callable[[], set[str]], settings: tuple[str, ...]) -> None:
    launcher = box.train("run.steps=1000", *settings)
    wait_for(lambda: box.steps() >= 2, START_S, "two steps")
    os.kill(driver(box), signal.SIGKILL)
    assert launcher.wait(60) != 0
    wait_for(lambda: not box.processes(), 10, "the end of all processes")
    assert below(box) == []
    assert not {name for name in shared() if name.startswith(("psm_", "megatron-rl-"))}
    if "sampler.fleet.replicas=1" in settings:
        assert not shared()


@pytest.mark.fault("kill -9 of the launcher in a rank's first second", "no rank lives on")
@pytest.mark.parametrize("after_s", [0.0, 0.2, 0.5])
def test_a_launcher_killed_while_ranks_start(box: Box, after_s: float) -> None:
    launcher = box.train("run.steps=1000", "learner.tensor_parallel=2")
    wait_for(lambda: box.processes("megatron_rl.rank"), START_S, "a rank")
    time.sleep(after_s)
    launcher.kill()
    wait_for(lambda: not box.processes(), 30, "the end of all processes")


def driver(box: Box) -> int:
    return next(one.pid for one in box.processes("megatron_rl.rank") if one.environ().get("RANK") == "0")
