"""What a shell may give a run: few files, little address space, variables of nonsense, folders of
strangers and without room.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

import pytest
from box import PATIENCE_S, Box

from megatron_rl.processes.environment import cache_home

pytestmark = pytest.mark.timeout(1200)


def refused(box: Box, *said: str, under: Sequence[str] = ()) -> None:
    """The run ends by itself, with these words and no traceback before the ranks' own; nothing is
    left.
    """
    assert box.train("run.steps=2", under=under).wait(PATIENCE_S) not in (0, None), box.screen
    last = box.screen.rstrip().splitlines()[-1]
    assert last.startswith(("error: ", "failed: ")), box.screen
    assert any(word in box.screen for word in said), box.screen
    box.until_over(60)


@pytest.mark.fault("`ulimit -n 64`", "the run ends by itself, and says what it lacks")
def test_few_files(box: Box) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs util-linux's prlimit")
    refused(box, "Too many open files", under=("prlimit", "--nofile=64", "--"))


NONSENSE = {
    "HOME": "/proc/none",
    "LANG": "xx_YY.nonsense",
    "LC_ALL": "none",
    "TZ": "No/Where",
    "TERM": "none",
}
NONSENSE |= {"OMP_NUM_THREADS": "many", "COLUMNS": "-5", "TMPDIR": "/proc/none"}
NONSENSE |= {"XDG_CACHE_HOME": str(cache_home())}  # it has what is compiled


@pytest.mark.fault(
    "HOME, TMPDIR, LANG, TZ, OMP_NUM_THREADS, ... of nonsense", "the run finishes without them"
)
def test_variables_of_nonsense(box: Box) -> None:
    box.env |= NONSENSE
    assert box.train("run.steps=2").wait(PATIENCE_S) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert box.steps() == 3


@pytest.mark.fault(
    "another user's folder is in the place of the compiled code",
    "the run is refused before it starts",
)
def test_a_cache_of_another_user(box: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make another user's folder")
    foreign = box.folder / "cache" / "megatron-rl"
    foreign.mkdir(parents=True)
    os.chown(foreign, 65533, 65533)
    box.env["XDG_CACHE_HOME"] = str(foreign.parent)
    refused(box, f"{foreign} is of user 65533")
    assert not (box.run / "metrics.jsonl").exists()


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
