"""The rows of a run's data file are others when it goes on."""

import pytest
from box import Box

PATIENCE_S = 600


@pytest.mark.timeout(1800)
@pytest.mark.fault("the data file is shuffled or cut before a run goes on", "refused unless asked for")
def test_other_rows(box: Box) -> None:
    toy = box.folder / "data" / "toy"
    rows = (toy / "train.jsonl").read_text().splitlines(keepends=True)
    train, more = box.folder / "mine.jsonl", ("run.if_exists=resume", "checkpoint.every=1", "data.train=mine.jsonl")
    train.write_text("".join(rows))
    assert box.train("run.steps=2", *more).wait(PATIENCE_S) == 0, box.screen
    lines = box.metrics()
    for other in (rows[::-1], rows[:-1]):
        train.write_text("".join(other))
        assert box.train("run.steps=3", *more).wait(PATIENCE_S) not in (0, None), box.screen
        assert "data.train: prompts or answers in mine.jsonl are not those that the run has drawn from" in box.screen
        assert "(data)" in box.screen
        assert box.metrics() == lines
    allowed = ("run.steps=3", "run.resume_allow=[data.train]", *more)
    assert box.train(*allowed).wait(PATIENCE_S) == 0, box.screen
    assert box.metrics()[:3] == lines
    assert box.steps() == 4
