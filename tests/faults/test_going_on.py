"""A run that is left alone ends; after a rank's death it goes on by itself; with other rows of data
it does not.
"""

import pytest
from box import PATIENCE_S, Box
from helpers import wait_for


@pytest.mark.fault(
    "a run is left alone", "it finishes, no process and no folder of its own is left"
)
def test_a_run_is_left_alone(box: Box) -> None:
    """What the other files of this folder rely on."""
    assert box.train("run.steps=2").wait(PATIENCE_S) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert box.steps() == 3
    box.left_nothing()


@pytest.mark.fault(
    "a rank is killed, with --attempts 3", "the run goes on from its checkpoint and finishes"
)
def test_a_run_goes_on_by_itself(box: Box) -> None:
    process = box.train("run.steps=8", "checkpoint.every=2", "--attempts", "3")
    saved = lambda: list((box.run / "checkpoints").glob("step_*"))  # noqa: E731
    wait_for(lambda: saved() or process.poll() is not None, "a checkpoint")
    box.rank(1).kill()
    assert process.wait(PATIENCE_S) == 0, box.screen
    status = box.status()
    assert (status["state"], status["attempt"]) == ("finished", 2)
    assert status["resumes_after"] >= 2
    assert status["before"]["state"] == "failed"
    assert "SIGKILL" in status["before"]["reason"]
    assert "attempt 1 of 3" in box.screen
    assert [line["progress/step"] for line in box.metrics()] == list(range(9))


@pytest.mark.timeout(1800)
@pytest.mark.fault(
    "the data file is shuffled or cut before a run goes on", "refused unless asked for"
)
def test_other_rows(box: Box) -> None:
    rows = (box.folder / "data" / "toy" / "train.jsonl").read_text().splitlines(keepends=True)
    train = box.folder / "mine.jsonl"
    more = ("run.if_exists=resume", "checkpoint.every=1", "data.train=mine.jsonl")
    train.write_text("".join(rows))
    assert box.train("run.steps=2", *more).wait(PATIENCE_S) == 0, box.screen
    lines = box.metrics()
    for other in (rows[::-1], rows[:-1]):
        train.write_text("".join(other))
        assert box.train("run.steps=3", *more).wait(PATIENCE_S) not in (0, None), box.screen
        assert "error: data.train: " in box.screen
        assert box.metrics() == lines
    allowed = ("run.steps=3", "run.resume_allow=[data.train]", *more)
    assert box.train(*allowed).wait(PATIENCE_S) == 0, box.screen
    assert box.metrics()[:3] == lines
    assert box.steps() == 4
