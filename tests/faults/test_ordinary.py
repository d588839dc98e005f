"""Nothing bad happens: what the other files of this folder rely on."""

import pytest
from box import Box


@pytest.mark.fault("a run is left alone", "it finishes, no process and no folder of its own is left")
def test_a_run_is_left_alone(box: Box) -> None:
    assert box.train("run.steps=2").wait(300) == 0, box.screen
    assert box.status()["state"] == "finished"
    assert box.steps() == 3
    assert not box.processes()
