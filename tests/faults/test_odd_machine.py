"""Odd surroundings of a run: few files, variables of nonsense, a temporary folder without room."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from box import PATIENCE_S, Box

from megatron_rl.processes.environment import cache_home

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.fault("`ulimit -n 64`", "the run ends by itself, and says what it lacks")
def test_few_files(box: Box) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs util-linux's prlimit")
    run = box.train("run.steps=2", under=("prlimit", "--nofile=64", "--"))
    assert run.wait(PATIENCE_S) not in (0, None), box.screen
    last = box.screen.rstrip().splitlines()[-1]
    assert last.startswith(("error: ", "failed: ")), box.screen
    assert "Too many open files" in box.screen
    box.until_over(60)


NONSENSE = {
    "HOME": "/proc/none",
    "LANG": "xx_YY.nonsense",
    "LC_ALL": "none",
    "TZ": "No/Where",
    "TERM": "none",
    "OMP_NUM_THREADS": "many",
    "COLUMNS": "-5",
    "TMPDIR": "/proc/none",
    "XDG_CACHE_HOME": str(cache_home()),  # it has what is compiled
}


@pytest.mark.fault(
    "HOME, TMPDIR, LANG, TZ, OMP_NUM_THREADS, ... of nonsense", "the run finishes without them"
)
def test_variables_of_nonsense(box: Box) -> None:
    box.env |= NONSENSE
    assert box.train("run.steps=2").wait(PATIENCE_S) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert box.steps() == 3


@pytest.fixture
def tiny(box: Box, request: pytest.FixtureRequest) -> Iterator[Box]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", str(box.tmp)], check=True
    )
    try:
        yield box
    finally:
        box.close()
        subprocess.run(["umount", str(box.tmp)], check=True)


@pytest.mark.fault("a temporary folder of a few KiB", "the run ends, with a sentence that names it")
@pytest.mark.parametrize("tiny", [12], indirect=True)  # no room for the ranks' meeting
def test_a_run_ends_where_nothing_can_be_written(tiny: Box) -> None:
    launcher = tiny.train("run.steps=3", "learner.tensor_parallel=2")
    assert launcher.wait(PATIENCE_S) not in (0, None), tiny.screen
    assert "No space left" in tiny.screen
    assert tiny.status()["state"] == "failed"
    assert "No space left" in tiny.status()["reason"]
    assert "TMPDIR" in tiny.status()["reason"]
    assert not tiny.processes()
