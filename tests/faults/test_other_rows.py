"""A run is resumed with other rows of data: refused unless allowed."""

import pytest
from box import PATIENCE_S, Box


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
        assert "data.train: prompts" in box.screen
        assert box.metrics() == lines
    allowed = ("run.steps=3", "run.resume_allow=[data.train]", *more)
    assert box.train(*allowed).wait(PATIENCE_S) == 0, box.screen
    assert box.metrics()[:3] == lines
    assert box.steps() == 4
