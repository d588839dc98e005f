"""What an engine may answer: asleep, in the middle of an update, awake again."""

import pytest

from megatron_rl.engine.readiness import CACHE, TAGS, WEIGHTS, Readiness


def served(version: int = 3) -> Readiness:
    ready = Readiness()
    ready.begin_update()
    ready.complete_update(version)
    return ready


def test_the_way_through_sleep_and_sync():
    ready = served()
    assert ready.refusal(3) is None
    ready.fall_asleep(level=2)
    assert "asleep (kv_cache, weights)" in ready.refusal()
    with pytest.raises(RuntimeError, match="wake them"):
        ready.begin_update()
    ready.wake([WEIGHTS])
    assert "asleep (kv_cache)" in ready.refusal()
    ready.begin_update()
    with pytest.raises(RuntimeError, match="before the cache wakes"):
        ready.wake([CACHE])
    ready.complete_update(4)
    assert "asleep (kv_cache)" in ready.refusal(4)
    ready.wake([CACHE])
    assert ready.refusal(4) is None


def test_discarded_weights_need_a_sync_and_kept_ones_do_not():
    ready = served()
    ready.fall_asleep(level=1)
    ready.wake(TAGS)
    assert ready.refusal(3) is None
    ready.fall_asleep(level=2)
    ready.wake(TAGS)
    assert "discarded" in ready.refusal(3)
    ready.begin_update()
    ready.abandon_update(torn=False)  # refused: nothing has come back
    assert "discarded" in ready.refusal(3)
    ready.begin_update()
    ready.complete_update(4)
    assert ready.refusal(4) is None


def test_an_update_that_is_not_finished():
    ready = served()
    ready.begin_update()
    assert "has begun and is not finished" in ready.refusal(3)
    with pytest.raises(RuntimeError, match="finish it before the engine sleeps"):
        ready.fall_asleep(1)
    ready.abandon_update(torn=False)
    assert ready.refusal(3) is None
    ready.begin_update()
    ready.abandon_update(torn=True)
    assert "of no version" in ready.refusal(3)


def test_another_version_than_the_announced_one_is_not_served():
    assert (
        served(3).refusal(4) == "the engine serves policy version 3, version 4 was announced last"
    )
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
