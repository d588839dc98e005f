"""Seeds, which make two samplers answer alike; the order in which an engine sleeps and wakes around a sync."""

import pytest

from megatron_rl.config.schema import Sleep
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.sampler.sampler import SleepSchedule, request_seed


def test_request_seeds_differ_by_run_and_group_and_leave_room_for_samples():
    seeds = {request_seed(seed, group) for seed in range(20) for group in range(200)}
    assert len(seeds) == 4000
    assert max(seeds) < 2**62
    assert request_seed(3, 5) == request_seed(3, 5)


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
    assert engine.calls == [("sleep", level), ("wake", [WEIGHTS]), "sync", ("wake", [CACHE])]
    schedule.sleep()
    schedule.wake()  # a step without a sync
    assert engine.calls[4:] == [("sleep", level), ("wake", [WEIGHTS]), ("wake", [CACHE])]


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
