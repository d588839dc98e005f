"""Several embedded engines: every prompt is answered once, and all serve the same version, whatever
befalls one.
"""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import wait_for
from tiny_engine import PROMPTS, SAMPLING, Live, rest, start_live

from megatron_rl.config.schema import Format
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.supervisor import POLL_S
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync import file_transport as transport
from megatron_rl.weight_sync.manifest import WeightSyncError

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="an engine for each of two cores"),
]
LONG = SamplingParams(samples=2, max_tokens=24)


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


def test_each_prompt_is_answered_once_by_one_of_them(live: Live) -> None:
    before = live.sampler.stats.tokens
    rollouts = live.rollouts()
    assert [(one.group, one.sample) for one in rollouts] == [
        (g, s) for g in range(len(PROMPTS)) for s in range(2)
    ]
    assert {one.policy_version for one in rollouts} == {live.sampler.policy_version}
    assert live.sampler.stats.tokens - before == sum(len(one.token_ids) for one in rollouts)
    assert rollouts == live.rollouts()
    one_by_one = [  # half of them by the other engine
        one
        for group, prompt in enumerate(PROMPTS)
        for one in live.sampler.generate([prompt], SAMPLING, seed=1, first_group=group, step=0)
    ]
    for rollout, alone in zip(rollouts, one_by_one, strict=True):
        assert (rollout.token_ids, rollout.group) == (alone.token_ids, alone.group)
        assert list(rollout.logprobs) == pytest.approx(list(alone.logprobs), abs=1e-2)


def test_a_version_that_one_of_them_refuses_is_served_by_none(live: Live, tmp_path: Path) -> None:
    served = live.sampler.policy_version
    before = live.rollouts()
    live.write(2)
    damaged = tmp_path / "damaged"
    shutil.copytree(live.directory, damaged, ignore=shutil.ignore_patterns("hf", "*.log"))
    for path in transport.version_directory(damaged, served + 1).glob("*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    live.sampler.replicas[1].format = Format.fp8  # it is told of another folder
    infos = {
        format.value: transport.update_info(folder, served + 1, 1, background=True)
        for format, folder in ((Format.int8, live.directory), (Format.fp8, damaged))
    }
    live.sampler.start_weight_update()
    with pytest.raises(WeightSyncError, match="corrupt tensor"):
        live.sampler.update_weights({BY_FORMAT: infos})
    live.sampler.replicas[1].format = Format.int8
    assert served_by_each(live) == [served, served]
    assert live.rollouts() == before
    live.load()  # the same version, whole
    assert served_by_each(live) == [served + 1, served + 1]
    assert live.rollouts() != before


@pytest.mark.fault(
    "one of several engines is killed while it answers", "it comes back; every prompt is answered"
)
def test_one_of_them_is_killed(live: Live) -> None:
    wanted = live.sampler.generate(PROMPTS, LONG, seed=3, first_group=0, step=0)
    answering = live.sampler.answering(LONG, seed=3)
    answering.add(PROMPTS, 0)
    live.kill(1)
    groups = rest(answering)
    assert [one.token_ids for number in sorted(groups) for one in groups[number]] == [
        one.token_ids for one in wanted
    ]
    wait_for(lambda: live.sampler.stats.restarts == 1, "it comes back")


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
