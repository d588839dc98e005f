"""Routing and retries, among engines that answer, die or hang at will."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import replica, until

from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.dispatch import TRIES, Dispatcher, Meter, Request
from megatron_rl.sampler.replica import NoServerLeft, Replica, State
from megatron_rl.sampler.sampler import request_seed
from megatron_rl.types import Prompt, Rollout, SamplingParams

PARAMS = SamplingParams(samples=2, max_tokens=4)


def run(
    replicas,
    count=8,
    *,
    use=None,
    params=PARAMS,
    served=(0,),
    patience_s=0.3,
    max_sequences=4,
    during=None,
) -> list[list[Rollout]]:
    """`use`: what is done with the dispatcher; else `count` jobs are asked and waited for."""

    async def main() -> list[list[Rollout]]:
        def gone(one: Replica, reason: str) -> None:
            one.mark_down(reason)
            dispatcher.notify()

        dispatcher = Dispatcher(
            replicas,
            served=served,
            max_sequences=max_sequences,
            patience_s=patience_s,
            on_gone=gone,
            meter=Meter(),
        )
        helper = asyncio.create_task(during(dispatcher, gone)) if during else None
        try:
            async with asyncio.timeout(240):
                done = await (use(dispatcher) if use else all_of(dispatcher, count, params))
                if helper:
                    await helper  # its assertions count
                return done
        finally:
            await dispatcher.close()
            await until(lambda: not any(one.running or one.engine.working for one in replicas))
            assert not any(dispatcher._load.values()), "engines received the cancellations"
            if helper:
                helper.cancel()

    return asyncio.run(main())


def job(number: int, params: SamplingParams = PARAMS) -> Request:
    return Request(number, Prompt(number, (number,), "", {}), 10 * number, params)


async def all_of(
    dispatcher: Dispatcher, count: int, params: SamplingParams = PARAMS
) -> list[list[Rollout]]:
    return await asyncio.gather(*(dispatcher.ask(job(number, params)) for number in range(count)))


def tokens(result: list[list[Rollout]]) -> list[list[list[int]]]:
    """By job."""
    return [[list(one.token_ids) for one in group] for group in result]


def expected(count: int) -> list[list[list[int]]]:
    """Each sample has a seed of its own."""
    return [[[index, 10 * index], [index, 10 * index + 1]] for index in range(count)]


def test_the_least_loaded_server_is_next():
    idle = replica("idle")
    busy = replica("busy")
    busy.load = 20  # ten prompts of another client
    run([busy, idle], 20, max_sequences=100)
    assert (len(idle.engine.asked), len(busy.engine.asked)) == (30, 10)


def test_an_engine_is_given_what_its_cache_holds_and_one_alone_is_given_everything():
    """A prompt of a token and its answer of 4: a cache of 20 holds 4 such sequences."""
    small = replica("a", pause_s=0.02)
    large = replica("b", pause_s=0.02)
    small.cache_tokens = 20
    run([small, large], 20, max_sequences=16)
    assert small.engine.most == 4
    assert large.engine.most == 20
    run([small], 20, max_sequences=16)
    assert small.engine.most == 40


def test_a_hanging_server_that_is_found_gone_gives_its_prompts_back():
    hanging = replica("hanging", hangs=True)
    other = replica("other")

    async def find_out(dispatcher, gone):
        await until(lambda: hanging.engine.asked)
        gone(hanging, "no answer")
        await until(lambda: 2 * dispatcher._meter.retried == len(hanging.engine.asked))

    assert tokens(run([hanging, other], 6, during=find_out)) == expected(6)


def test_a_retried_prompt_comes_before_those_that_wait():
    dying = replica("dying", dies_at=1)
    other = replica("other", once=lambda: not dying.ready)
    run([dying, other], 4, max_sequences=2)
    assert other.engine.asked[::2] == [10, 0, 20, 30]


def test_a_server_that_is_behind_is_not_asked_and_one_that_lies_about_it_is_taken_out():
    behind = replica("behind", version=3)
    current = replica("c", version=4)
    lying = replica("lying", version=4, lie=(3, 3))
    assert tokens(run([behind, lying, current], 6, served=[3, 4])) == expected(6)
    assert behind.engine.asked == []
    assert not lying.ready
    assert "3, not 4" in lying.reason


def test_an_answer_may_be_of_every_version_since_its_job_was_given_out_and_of_no_other():
    served, updated = [3, 4], lambda: served[-1] == 5
    one = replica("one", version=4, once=updated)
    other = replica(
        "other",
        version=4,
        once=updated,
        lie=(3, 5),
    )

    async def update(dispatcher, gone):
        await until(lambda: one.engine.asked and other.engine.asked)
        served.append(5)
        for each in (one, other):
            each.version = each.engine.version = 5
        dispatcher.notify()

    done = run([one, other], 2, served=served, during=update)
    assert tokens(done) == expected(2)
    assert [one.policy_version for one, _ in done] == [4, 5], "drawn again with the new version"
    assert [list(one.versions or ()) for one, _ in done] == [[4, 5], []]
    assert "not 4 or 5" in other.reason


@pytest.mark.fault(
    "a short answer of new weights overtakes the news that they are loaded", "it is a right answer"
)
@pytest.mark.parametrize("loaded", [True, False])
def test_an_answer_may_come_before_the_news_of_its_weights(loaded: bool):
    served = [4]
    one = replica("one", version=4, lie=(5, 5))
    spare = replica("spare", version=3)
    one.engine.once = lambda: one.state is State.updating

    async def update(dispatcher: Dispatcher, gone) -> None:
        await until(lambda: one.engine.asked)
        one.begin_update()
        await until(lambda: not one.engine.working)
        await asyncio.sleep(0.03)
        assert one.ready
        served.extend([5] * loaded)  # else another engine could not load them
        one.end_update()
        spare.version = served[-1]
        spare.engine.version = served[-1]
        dispatcher.notify()

    (done,) = run([one, spare], 1, served=served, during=update)
    assert one.ready == loaded
    assert done[0].policy_version == (5 if loaded else 4)


def test_copies_of_one_sample_are_drawn_once():
    one = replica()
    (done,) = run([one], 1, params=replace(PARAMS, temperature=0.0))
    assert [list(each.token_ids) for each in done] == [[0, 0], [0, 0]]
    assert one.engine.asked == [0]


@pytest.mark.parametrize(("dies_at", "reason"), [(1, "killed"), (None, "no answer")])
def test_a_prompt_that_ends_every_server_is_given_up(dies_at, reason):
    several = [replica(str(i), dies_at=dies_at) for i in range(TRIES + 1)]
    for one in several:
        one.engine.once = lambda one=one: dies_at or one.mark_down(reason)  # as its supervisor does
    with pytest.raises(SamplerError, match=f"failed in {TRIES} tries.*{reason}"):
        run(several, 1)
    assert not several[TRIES].engine.asked


def test_with_no_server_left_the_error_holds_the_end_of_each():
    dying = replica("server 0", dies_at=2)
    ended = replica("server 1", ready=False)
    ended.give_up("given up:\nRuntimeError: no room")
    with pytest.raises(NoServerLeft, match=r"(?s)server 0: killed.*server 1:\nRuntimeError"):
        run([dying, ended], 4)


@pytest.mark.fault(
    "a prompt that no server takes",
    "the run ends with one refusal, which names it; no server is lost",
)
def test_a_refused_prompt_is_named_and_spoils_no_other():
    both = [replica("a", refused=(5,)), replica("b", refused=(5,))]

    async def use(dispatcher: Dispatcher) -> list[list[Rollout]]:
        with pytest.raises(SamplerError, match=r"prompt 5 .*refused"):
            await dispatcher.ask(job(5))
        return await all_of(dispatcher, 2)

    assert tokens(run(both, use=use)) == expected(2)
    assert all(one.ready for one in both)
    assert sum(one.engine.asked.count(50) for one in both) == 1


def test_two_share_the_servers_and_neither_starves():
    both = [replica("a", hangs=True), replica("b", hangs=True)]

    async def use(dispatcher: Dispatcher) -> list[list[Rollout]]:
        asked = asyncio.ensure_future(all_of(dispatcher, 100))
        await until(lambda: sum(one.load for one in both) >= 8)
        for one in both:
            one.engine.hangs = False
        other = Dispatcher(
            both,
            served=[0],
            max_sequences=4,
            patience_s=0.3,
            on_gone=Replica.mark_down,
            meter=Meter(),
        )
        try:
            assert tokens(await all_of(other, 4)) == expected(4)
        finally:
            await other.close()
            asked.cancel()
        return []

    run(both, use=use)


def test_a_server_that_is_updated_takes_no_prompt_and_patience_does_not_run_meanwhile():
    only = replica()
    only.begin_update()

    async def update(dispatcher, gone):
        await asyncio.sleep(0.4)
        assert only.engine.asked == []
        only.end_update()
        dispatcher.notify()

    assert tokens(run([only], 2, patience_s=0.1, during=update)) == expected(2)


@settings(max_examples=60, deadline=None)
@given(
    # as many deaths as tries, all over one prompt, and the prompt itself is suspected
    deaths=st.lists(st.one_of(st.none(), st.integers(1, 6)), max_size=TRIES - 1),
    added=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    pauses=st.lists(
        st.sampled_from([0.0, 0.001, 0.003]),
        min_size=TRIES,
        max_size=TRIES,
    ),
    max_sequences=st.integers(1, 12),
)
def test_every_prompt_gets_one_response_if_any_engine_dies_at_any_time(
    deaths, added, pauses, max_sequences
):
    replicas = [
        replica(str(i), dies_at=death, pause_s=pause)
        for i, (death, pause) in enumerate(zip([*deaths, None], pauses, strict=False))
    ]

    async def use(dispatcher: Dispatcher) -> list[list[Rollout]]:
        asked: list[asyncio.Task[list[Rollout]]] = []
        for count in added:
            asked += [
                asyncio.create_task(dispatcher.ask(job(number)))
                for number in range(len(asked), len(asked) + count)
            ]
            if asked:
                await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return await asyncio.gather(*asked)

    assert tokens(run(replicas, use=use, max_sequences=max_sequences)) == expected(sum(added))


def test_request_seeds_differ_by_run_and_group_and_leave_room_for_samples():
    seeds = {
        request_seed(seed, group) + sample
        for seed in range(20)
        for group in range(200)
        for sample in range(8)
    }
    assert len(seeds) == 32000
    assert max(seeds) < 2**62
    assert request_seed(3, 5) == request_seed(3, 5)


@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_a_job_that_is_cancelled_as_it_gets_an_engine_is_worked_on_by_none(turns: int):
    only = replica()
    only.begin_update()

    async def use(dispatcher: Dispatcher) -> list[list[Rollout]]:
        asked = asyncio.ensure_future(dispatcher.ask(job(1)))
        await asyncio.sleep(0.01)
        only.end_update()
        dispatcher.notify()
        for _ in range(turns):
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(0.01)
        assert (only.load, only.engine.working, asked.cancelled()) == (0, 0, True)
        return await all_of(dispatcher, 2)

    assert tokens(run([only], use=use)) == expected(2)


def test_jobs_that_waited_are_given_out_together():
    only = replica(pause_s=0.01)
    only.begin_update()

    async def update(dispatcher: Dispatcher, gone) -> None:
        await until(lambda: len(dispatcher._waiting) == 6)
        only.end_update()
        dispatcher.notify()
        assert only.load == 12
        assert not dispatcher._waiting

    assert tokens(run([only], 6, during=update)) == expected(6)
