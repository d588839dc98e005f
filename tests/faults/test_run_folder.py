"""The folder of a whole run can no longer be written in mid-run."""

import shutil

import pytest
from box import PATIENCE_S, Box

pytestmark = pytest.mark.timeout(1800)
# root, to whom modes of files apply
AS_OTHERS = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
)


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
    assert process.wait(PATIENCE_S) not in (0, None), box.screen
    box.until_over(60)
    box.left_nothing()
    last = box.screen.rstrip().splitlines()[-1]
    assert last.startswith("failed: "), box.screen
    assert "cannot be written" in last
    for path in (*files, *folders):
        if path.exists():
            path.chmod(0o755 if path.is_dir() else 0o644)
    steps = box.steps()
    more = ("run.if_exists=resume", "checkpoint.every=2", f"run.steps={steps + 1}")
    assert box.train(*more).wait(PATIENCE_S) == 0, box.screen
    assert [line["progress/step"] for line in box.metrics()] == [*range(steps + 2)]
