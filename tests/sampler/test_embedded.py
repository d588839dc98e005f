"""Two embedded engines: cores of their own, sleep and wake together."""

import os
import time
from collections.abc import Iterator

import pytest
from helpers import wait_for
from tiny_engine import Live, start_live

from megatron_rl.config.schema import Format
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.supervisor import POLL_S

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine for each of two cores"),
]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from start_live(
        tmp_path_factory.mktemp("several"), Format.int8, tied=True, seed=1, engines=2
    )


def served_by_each(live: Live) -> list[int]:
    return [one["policy_version"] for one in live.sampler.health()["engines"]]


def test_each_engine_has_cores_of_its_own(live: Live) -> None:
    cores = [os.sched_getaffinity(one.process.pid) for one in live.sampler.replicas]
    assert cores[0].isdisjoint(cores[1])


@pytest.mark.fault(
    "one of several engines dies asleep", "it starts again when the others wake, with their weights"
)
def test_they_sleep_and_wake_together(live: Live) -> None:
    wanted = live.rollouts()
    before = live.sampler.stats.restarts
    live.sampler.sleep(1)
    with pytest.raises(SamplerError, match="asleep"):
        live.rollouts()
    live.kill(0)
    wait_for(lambda: not live.sampler.replicas[0].up)
    time.sleep(2 * POLL_S)
    assert live.sampler.stats.restarts == before
    live.sampler.wake([WEIGHTS])
    live.sampler.wake([CACHE])
    wait_for(lambda: all(one.ready for one in live.sampler.replicas))
    assert live.sampler.stats.restarts == before + 1
    assert live.rollouts() == wanted
