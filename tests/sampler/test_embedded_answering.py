"""Prompts that the embedded engine answers for one thread, while another one asks it other things."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from tiny_engine import PROMPTS, Live, make_live, startable

from megatron_rl.config.schema import Format
from megatron_rl.sampler.protocol import Answering, SamplerError
from megatron_rl.types import Rollout, SamplingParams
from megatron_rl.weight_sync import file_transport as transport

pytestmark = pytest.mark.engine

LONG = SamplingParams(samples=8, max_tokens=24)
PATIENCE_S = 240.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = make_live(tmp_path_factory.mktemp("answering"), Format.none, tied=True)
    try:
        live.restart()
        live.update(1)
        with startable():
            yield live
    finally:
        live.sampler.close()


def rest(answering: Answering) -> dict[int, list[Rollout]]:
    """Every group that is still to come; none comes twice."""
    groups: dict[int, list[Rollout]] = {}
    while more := answering.finished():
        for group in more:
            assert [one.sample for one in group] == list(range(len(group)))
            assert {one.group for one in group}.isdisjoint(groups)
            groups[group[0].group] = group
    return groups


def in_the_background(live: Live, rounds: int = 1) -> tuple[threading.Event, Future[dict[int, list[Rollout]]]]:
    """All prompts, `rounds` times; set once the engine has begun."""
    begun = threading.Event()

    def collect() -> dict[int, list[Rollout]]:
        answering = live.sampler.answering(LONG, seed=7)
        for index in range(rounds):
            answering.add(PROMPTS, len(PROMPTS) * index)
        begun.set()
        return rest(answering)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(collect)
    pool.shutdown(wait=False)
    return begun, future


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def versions_of(groups: dict[int, list[Rollout]]) -> set[int]:
    return {one.policy_version for group in groups.values() for one in group}


def essence(rollouts: list[Rollout]) -> list[tuple]:
    return [(one.group, one.sample, one.token_ids, one.logprobs, one.policy_version) for one in rollouts]


def test_groups_come_as_the_list_has_them(live: Live) -> None:
    whole = live.rollouts(seed=7, params=LONG)
    before = live.sampler.stats
    answering = live.sampler.answering(LONG, seed=7)
    assert answering.finished() == []
    answering.add(PROMPTS, 0)
    groups = rest(answering)
    assert essence([one for group in range(len(PROMPTS)) for one in groups[group]]) == essence(whole)
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
    assert sum(a == b.token_ids for a, b in zip(mine, whole, strict=True)) > 0.8 * len(whole), "but for rounding"


def test_what_is_given_up_leaves_the_engine(live: Live) -> None:
    answering = live.sampler.answering(LONG, seed=7)
    answering.add(PROMPTS, 0)
    answering.close()
    assert live.sampler.health()["open"] == 0
    assert answering.finished() == []
    answering.add(PROMPTS[:1], 0)
    assert list(rest(answering)) == [0]


def test_another_thread_is_answered_meanwhile(live: Live) -> None:
    begun, answers = in_the_background(live, rounds=8)
    begun.wait(PATIENCE_S)
    seen = [live.sampler.health()["open"] for _ in range(200)]
    assert max(seen) > 0
    groups = answers.result(PATIENCE_S)
    assert sorted(groups) == list(range(8 * len(PROMPTS)))
    assert essence(live.rollouts()) == essence(live.rollouts())


def test_an_update_comes_between_two_tokens(live: Live) -> None:
    version = live.sampler.policy_version
    begun, answers = in_the_background(live, rounds=6)
    begun.wait(PATIENCE_S)
    wait_for(lambda: live.sampler.health()["open"] > 0)
    live.update(2)
    rollouts = [one for group in answers.result(PATIENCE_S).values() for one in group]
    spanning = [one for one in rollouts if one.versions is not None]
    assert spanning
    for one in spanning:
        assert len(one.versions) == len(one.token_ids) == len(one.logprobs)
        assert set(one.versions) == {version, version + 1}
        assert list(one.versions) == sorted(one.versions)
        assert one.policy_version == one.versions[0]
    assert {one.policy_version for one in rollouts} == {version, version + 1}
    assert {one.policy_version for one in live.rollouts()} == {version + 1}
    live.update(1)


def test_prompts_that_come_in_mid_update_wait_for_its_end(live: Live) -> None:
    """In place: `background` is what lets the engine go on."""
    live.write(3)
    version = live.next_version
    live.sampler.start_weight_update()
    with pytest.raises(SamplerError, match="has begun and is not finished"):
        live.rollouts()
    begun, answers = in_the_background(live)
    begun.wait(PATIENCE_S)
    assert live.sampler.health()["open"] == 0
    live.sampler.update_weights(transport.update_info(live.directory, version, 1))
    live.sampler.finish_weight_update(str(version))
    rollouts = [one for group in answers.result(PATIENCE_S).values() for one in group]
    assert {one.policy_version for one in rollouts} == {version}
    assert {one.versions for one in rollouts} == {None}
    live.update(1)


@pytest.mark.fault(
    "the embedded engine is killed while prompts are answered in the background; and in mid-update",
    "another one takes its place, started by one of the threads; every group comes once",
)
def test_a_killed_engine_loses_no_group(live: Live) -> None:
    begun, answers = in_the_background(live, rounds=4)
    begun.wait(PATIENCE_S)
    wait_for(lambda: live.sampler.health()["open"] > 0)
    first = live.sampler.policy_version
    process = live.sampler._engines[0].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert live.sampler.health()["policy_version"] == first, "both threads have noticed, one has started another one"
    assert live.sampler.stats.restarts == 1
    assert sorted(answers.result(PATIENCE_S)) == list(range(4 * len(PROMPTS)))

    begun, answers = in_the_background(live, rounds=4)
    begun.wait(PATIENCE_S)
    live.update(2, "killed_while_building")  # the main thread waits for the new weights
    groups = answers.result(PATIENCE_S)
    assert live.sampler.stats.restarts == 2
    assert sorted(groups) == list(range(4 * len(PROMPTS)))
    assert versions_of(groups) <= {first, first + 1}


@pytest.mark.fault(
    "the embedded engine is killed between two calls of an update, while prompts are answered in the background",
    "the thread that reads the answers starts another one; none is of the weights that it starts with",
)
def test_a_new_engine_without_weights_answers_nothing(live: Live) -> None:
    version, restarts = live.next_version, live.sampler.stats.restarts
    live.write(3)
    begun, answers = in_the_background(live, rounds=8)
    begun.wait(PATIENCE_S)
    wait_for(lambda: live.sampler.health()["open"] > 0)
    live.sampler.start_weight_update()
    live.sampler.update_weights(transport.update_info(live.directory, version, 1, background=True))
    process = live.sampler._engines[0].process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert live.sampler.health()["policy_version"] == -1
    assert live.sampler.stats.restarts == restarts + 1
    assert {live.sampler.health()["open"] for _ in range(200)} == {0}
    live.sampler.finish_weight_update(str(version))
    groups = answers.result(PATIENCE_S)
    assert sorted(groups) == list(range(8 * len(PROMPTS)))
    assert versions_of(groups) <= {version - 1, version}
    assert version in versions_of(groups)


def test_closing_ends_whoever_waits(live: Live, tmp_path: Path) -> None:
    """What Ctrl-C in the main thread comes to; nobody starts another engine."""
    begun, answers = in_the_background(live, rounds=8)
    begun.wait(PATIENCE_S)
    wait_for(lambda: live.sampler.health()["open"] > 0)
    restarts = live.sampler.stats.restarts
    live.sampler.close()
    with pytest.raises(SamplerError, match="is not running"):
        answers.result(PATIENCE_S)
    assert live.sampler._engines[0].process is None
    assert live.sampler.stats.restarts == restarts
