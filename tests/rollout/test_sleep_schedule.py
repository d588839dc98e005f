"""The order in which an engine sleeps and wakes around a sync."""

import pytest

from megatron_rl.config.schema import Sleep
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.rollout.sleep_schedule import SleepSchedule


class Calls:
    def __init__(self) -> None:
        self.calls: list = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def wake(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake", tags))


@pytest.mark.parametrize(("mode", "level"), [(Sleep.offload, 1), (Sleep.discard, 2)])
def test_wake_weights_then_sync_then_wake_cache(mode, level):
    engine = Calls()
    schedule = SleepSchedule(engine, mode)
    schedule.wake()  # before the first request: it never slept
    schedule.sleep()
    schedule.sleep()
    with schedule.syncing():
        engine.calls.append("sync")
    schedule.wake()
    assert engine.calls == [
        ("sleep", level),
        ("wake", [WEIGHTS]),
        "sync",
        ("wake", [CACHE]),
    ]
    schedule.sleep()
    schedule.wake()  # a step without a sync
    assert engine.calls[4:] == [
        ("sleep", level),
        ("wake", [WEIGHTS]),
        ("wake", [CACHE]),
    ]


def test_a_failed_sync_leaves_the_cache_asleep():
    engine = Calls()
    schedule = SleepSchedule(engine, Sleep.discard)
    schedule.sleep()
    with pytest.raises(RuntimeError), schedule.syncing():
        raise RuntimeError
    assert engine.calls == [("sleep", 2), ("wake", [WEIGHTS])]


def test_without_sleep_nothing_is_called():
    engine = Calls()
    schedule = SleepSchedule(engine, Sleep.none)
    schedule.sleep()
    schedule.wake()
    assert engine.calls == []
