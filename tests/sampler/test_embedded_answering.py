"""Prompts that the embedded engine answers for one thread, while another one asks it other
things.
"""

import time
from collections.abc import Iterator

import pytest
from tiny_engine import PROMPTS, Live, essence, rest, start_live

from megatron_rl.config.schema import Format
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.types import Rollout, SamplingParams
from megatron_rl.weight_sync import file_transport as transport

pytestmark = pytest.mark.engine

LONG = SamplingParams(samples=8, max_tokens=24)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    yield from start_live(tmp_path_factory.mktemp("answering"), Format.none, tied=True, seed=1)


def versions_of(rollouts: list[Rollout]) -> set[int]:
    return {one.policy_version for one in rollouts}


def test_groups_come_as_the_list_has_them(live: Live) -> None:
    whole = live.rollouts(seed=7, params=LONG)
    before = live.sampler.stats
    answering = live.sampler.answering(LONG, seed=7)
    assert answering.finished() == []
    answering.add(PROMPTS, 0)
    groups = rest(answering)
    assert essence([one for group in range(len(PROMPTS)) for one in groups[group]]) == essence(
        whole
    )
    after = live.sampler.stats
    assert after.tokens - before.tokens == sum(len(one.token_ids) for one in whole)
    assert after.seconds > before.seconds
    time.sleep(0.02)
    assert live.sampler.stats.seconds == after.seconds, "nothing is open"


def test_more_can_be_added_while_others_are_answered(live: Live) -> None:
    answering = live.sampler.answering(LONG, seed=7)
    answering.add(PROMPTS[:4], 0)
    groups = {group[0].group: group for group in answering.finished()}
    answering.add(PROMPTS[4:], 4)
    answering.add([], 6)
    groups |= rest(answering)
    whole = live.rollouts(seed=7, params=LONG)
    mine = [one.token_ids for group in range(len(PROMPTS)) for one in groups[group]]
    assert sum(a == b.token_ids for a, b in zip(mine, whole, strict=True)) > 0.8 * len(whole), (
        "but for rounding"
    )


def test_what_is_given_up_leaves_the_engine(live: Live) -> None:
    answering = live.sampler.answering(LONG, seed=7)
    answering.add(PROMPTS, 0)
    answering.close()
    assert live.sampler.health()["open"] == 0
    assert answering.finished() == []
    answering.add(PROMPTS[:1], 0)
    assert list(rest(answering)) == [0]


def test_another_thread_is_answered_meanwhile(live: Live) -> None:
    with live.collecting():
        live.until_open()
    assert live.answers() == live.answers()


def test_an_update_comes_between_two_tokens(live: Live) -> None:
    for _ in range(20):  # the engine may be between two rounds of answers
        version = live.sampler.policy_version
        with live.collecting() as rollouts:
            live.write(2)
            live.until_open()
            live.load()
        if spanning := [one for one in rollouts if one.versions is not None]:
            break
    assert spanning
    for one in spanning:
        assert len(one.versions) == len(one.token_ids) == len(one.logprobs)
        assert set(one.versions) == {version, version + 1}
        assert list(one.versions) == sorted(one.versions)
        assert one.policy_version == one.versions[0]
    assert versions_of(rollouts) == {version, version + 1}
    assert versions_of(live.rollouts()) == {version + 1}
    live.update(1)


def test_prompts_that_come_in_mid_update_wait_for_its_end(live: Live) -> None:
    """In place: `background` is what lets the engine go on."""
    live.write(3)
    version = live.next_version
    live.sampler.start_weight_update()
    with pytest.raises(SamplerError, match="has begun and is not finished"):
        live.rollouts()
    with live.collecting(first=False) as rollouts:
        assert live.sampler.health()["open"] == 0
        live.sampler.update_weights(transport.update_info(live.directory, version, 1))
        live.sampler.finish_weight_update(str(version))
    assert versions_of(rollouts) == {version}
    assert {one.versions for one in rollouts} == {None}
    live.update(1)


@pytest.mark.fault(
    "the embedded engine is killed while prompts are answered in the background; and in mid-update",
    "another one takes its place, started by one of the threads; every group comes once",
)
def test_a_killed_engine_loses_no_group(live: Live) -> None:
    first = live.sampler.policy_version
    with live.collecting():
        live.until_open()
        live.kill()
        assert live.sampler.health()["policy_version"] == first, (
            "both threads have noticed, one has started another"
        )
        assert live.sampler.stats.restarts == 1
    with live.collecting() as rollouts:
        live.update(2, "killed_while_building")  # the main thread waits for the new weights
    assert live.sampler.stats.restarts == 2
    assert versions_of(rollouts) <= {first, first + 1}


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


def test_closing_ends_whoever_waits_and_launching_begins_anew(live: Live) -> None:
    """What Ctrl-C in the main thread comes to; nobody starts another engine."""
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
