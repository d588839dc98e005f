"""What a shell may give a run: few files, little address space, variables of nonsense, folders of strangers."""

import os
import shutil
from collections.abc import Sequence

import pytest
from box import Box, wait_for

from megatron_rl.processes.environment import cache_home

pytestmark = pytest.mark.timeout(1200)
END_S = 600


def refused(box: Box, *said: str, under: Sequence[str] = ()) -> None:
    """The run ends by itself, with these words and no traceback before the ranks' own; nothing is left."""
    assert box.train("run.steps=2", under=under).wait(END_S) not in (0, None), box.screen
    last = box.screen.rstrip().splitlines()[-1]
    assert last.startswith(("error: ", "failed: ")), box.screen
    assert any(word in box.screen for word in said), box.screen
    wait_for(lambda: not box.processes(), 60, "processes are left")


@pytest.mark.fault("`ulimit -n 64`, `ulimit -v` of 1 GiB", "the run ends by itself, and says what it lacks")
@pytest.mark.parametrize(("limit", "said"), [("--nofile=64", "(open_files)"), ("--as=1073741824", "(host_memory)")])
def test_limits(box: Box, limit: str, said: str) -> None:
    if shutil.which("prlimit") is None:
        pytest.skip("needs util-linux's prlimit")
    refused(box, said, under=("prlimit", limit, "--"))


NONSENSE = {"HOME": "/proc/none", "LANG": "xx_YY.nonsense", "LC_ALL": "none", "TZ": "No/Where", "TERM": "none"}
NONSENSE |= {
    "OMP_NUM_THREADS": "many",
    "COLUMNS": "-5",
    "TMPDIR": "/proc/none",
    "XDG_CACHE_HOME": str(cache_home()),  # it has what is compiled
}


@pytest.mark.fault("HOME, TMPDIR, LANG, TZ, OMP_NUM_THREADS, ... of nonsense", "the run finishes without them")
def test_variables_of_nonsense(box: Box) -> None:
    box.env |= NONSENSE
    assert box.train("run.steps=2").wait(END_S) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert box.steps() == 3


@pytest.mark.fault("another user's folder is in the place of the compiled code", "the run is refused before it starts")
def test_a_cache_of_another_user(box: Box) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make another user's folder")
    foreign = box.folder / "cache" / "megatron-rl"
    foreign.mkdir(parents=True)
    os.chown(foreign, 65533, 65533)
    box.env["XDG_CACHE_HOME"] = str(foreign.parent)
    refused(box, f"{foreign} is of user 65533")
    assert not (box.run / "metrics.jsonl").exists()
