"""Prompts that the embedded engine answers for one thread, while another one asks it other things."""

from collections.abc import Iterator

import pytest
from tiny_engine import Live, start_live

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import Rollout
from megatron_rl.weight_sync import file_transport as transport

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from start_live(tmp_path_factory.mktemp("stream"), Format.none, tied=True, seed=1)


def versions_of(rollouts: list[Rollout]) -> set[int]:
    return {one.policy_version for one in rollouts}


def test_prompts_that_come_in_mid_update_wait_for_its_end(live: Live) -> None:
    """In place: `background` is what lets the engine go on."""
    live.write(3)
    version = live.next_version
    live.sampler.start_weight_update()
    with pytest.raises(SamplerError, match="is not finished"):
        live.rollouts()
    with live.collecting(first=False) as rollouts:
        assert live.sampler.health()["open"] == 0
        live.sampler.update_weights(transport.update_info(live.directory, version, 1))
        live.sampler.finish_weight_update(str(version))
    assert versions_of(rollouts) == {version}
    assert {one.versions for one in rollouts} == {None}
    live.update(1)


@pytest.mark.fault(
    "the embedded engine is killed between two calls of an update, while prompts are answered in "
    "the background",
    "the thread that reads the answers starts another one; none is of the weights that it starts "
    "with",
)
def test_a_new_engine_without_weights_answers_nothing(live: Live) -> None:
    version = live.next_version
    restarts = live.sampler.stats.restarts
    live.write(3)
    with live.collecting() as rollouts:
        live.until_open()
        live.stage()
        live.kill()
        assert live.sampler.health()["policy_version"] == -1
        assert live.sampler.stats.restarts == restarts + 1
        assert {live.sampler.health()["open"] for _ in range(200)} == {0}
        live.sampler.finish_weight_update(str(version))
    assert versions_of(rollouts) <= {version - 1, version}
    assert version in versions_of(rollouts)


def test_closing_ends_waiting_calls_and_the_engine_can_be_launched_again(live: Live) -> None:
    """Close while samples are open, as Ctrl-C in the main thread does; no engine is restarted."""
    restarts = live.sampler.stats.restarts

    def close_in_mid_answer() -> None:
        with live.collecting():
            live.until_open()
            live.sampler.close()

    with pytest.raises(SamplerError, match="is not running"):
        close_in_mid_answer()
    assert live.sampler.replicas == []
    assert live.sampler.stats.restarts == restarts
    live.restart()
    assert live.sampler.policy_version == live.sampler.health()["policy_version"] == -1
