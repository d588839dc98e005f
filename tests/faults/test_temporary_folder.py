"""A temporary folder without room: a run says so and ends; nobody waits for a lock for ever."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from box import Box

END_S = 300


@pytest.fixture
def tiny(box: Box, request: pytest.FixtureRequest) -> Iterator[Box]:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}k", "tmpfs", str(box.tmp)], check=True)
    try:
        yield box
    finally:
        box.close()
        subprocess.run(["umount", str(box.tmp)], check=True)


@pytest.mark.fault("a temporary folder of a few KiB", "the run ends, with a sentence that names it")
@pytest.mark.parametrize("tiny", [8, 12], indirect=True)  # no room for the engine's files; for the ranks' meeting
def test_a_run_ends_where_nothing_can_be_written(tiny: Box) -> None:
    launcher = tiny.train("run.steps=3", "learner.tensor_parallel=2")
    assert launcher.wait(END_S) not in (0, None), tiny.screen
    assert "No space left" in tiny.screen
    assert tiny.status()["state"] == "failed"
    assert "No space left" in tiny.status()["reason"]
    assert "TMPDIR" in tiny.status()["reason"]
    assert not tiny.processes()
