"""Requests that an engine takes in the middle of an update, and of other versions."""

import pytest

from megatron_rl.engine.readiness import TAGS, Readiness


def served(version: int = 3) -> Readiness:
    ready = Readiness()
    ready.begin_update()
    ready.complete_update(version)
    return ready


def test_an_update_that_is_not_finished():
    ready = served()
    ready.begin_update()
    assert "is not finished" in ready.refusal(3)
    with pytest.raises(RuntimeError, match="finish it"):
        ready.fall_asleep(1)
    ready.abandon_update(torn=False)
    assert ready.refusal(3) is None
    ready.begin_update()
    ready.abandon_update(torn=True)
    assert "of no version" in ready.refusal(3)


def test_another_version_than_the_announced_one_is_not_served():
    assert "version 4" in (served(3).refusal(4) or "")
    assert served(3).refusal(4, or_newer=True) == served(3).refusal(4)
    assert served(3).refusal(2) is not None
    assert served(3).refusal(2, or_newer=True) is served(3).refusal(3, or_newer=True) is None
    assert Readiness().refusal() is None, "dummy weights: nobody has named a version yet"


def test_an_engine_that_never_slept_is_awake_whatever_it_is_told_of():
    ready = served()
    ready.begin_update()  # it starts again while the others wake
    ready.wake(TAGS)
    ready.complete_update(4)
    assert ready.refusal(4) is None
