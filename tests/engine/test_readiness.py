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
    ready.abandon_update(incomplete=False)
    assert ready.refusal(3) is None
    ready.begin_update()
    ready.abandon_update(incomplete=True)
    assert "of no version" in ready.refusal(3)


def test_dummy_weights_are_of_any_version():
    assert Readiness().refusal() is None


def test_an_engine_that_never_slept_stays_awake_after_wake():
    ready = served()
    ready.begin_update()  # it starts again while the others wake
    ready.wake(TAGS)
    ready.complete_update(4)
    assert ready.refusal(4) is None
