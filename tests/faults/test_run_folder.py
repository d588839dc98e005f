"""The folder of a whole run goes away, or can no longer be written, in mid-run."""

import shutil
import subprocess

import pytest
from box import PATIENCE_S, Box

pytestmark = pytest.mark.timeout(1800)
# root, to whom modes of files apply
AS_OTHERS = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
)


def ended(box: Box, process: subprocess.Popen[str]) -> str:
    """The last words of a run that ends by itself and leaves nothing."""
    assert process.wait(PATIENCE_S) not in (0, None), box.screen
    box.until_over(60)
    box.left_nothing()
    last = box.screen.rstrip().splitlines()[-1]
    assert last.startswith("failed: "), box.screen
    return last


@pytest.mark.fault(
    "the folder of a whole run is removed in mid-run",
    "the run ends with a sentence, and makes none",
)
def test_it_is_removed(box: Box) -> None:
    process = box.begin("checkpoint.every=2")
    shutil.rmtree(box.run, ignore_errors=True)
    assert "runs/run was removed" in ended(box, process)
    assert "why: RecordLost" in box.screen
    assert not (box.run / "metrics.jsonl").exists()


@pytest.mark.fault(
    "a whole run's folder can only be read from a step on",
    "the run ends with a sentence, and goes on later",
)
def test_it_can_only_be_read(box: Box) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("needs util-linux's setpriv")
    process = box.begin("checkpoint.every=2", under=AS_OTHERS)
    folders = [box.run, *(path for path in box.run.rglob("*") if path.is_dir())]
    files = [path for path in box.run.rglob("*") if path.is_file()]
    for path in (*files, *folders):
        path.chmod(0o555 if path.is_dir() else 0o444)
    assert "cannot be written" in ended(box, process)
    for path in (*files, *folders):
        if path.exists():
            path.chmod(0o755 if path.is_dir() else 0o644)
    steps = box.steps()
    more = ("run.if_exists=resume", "checkpoint.every=2", f"run.steps={steps + 1}")
    assert box.train(*more).wait(PATIENCE_S) == 0, box.screen
    assert [line["progress/step"] for line in box.metrics()] == [*range(steps + 2)]
