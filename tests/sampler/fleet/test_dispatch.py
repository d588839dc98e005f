"""Routing and retries, with stand-ins that answer, die or hang at will in place of the HTTP client."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import Format
from megatron_rl.sampler.fleet.dispatch import TRIES, Dispatched, Dispatcher, Job
from megatron_rl.sampler.fleet.replica import Answer, Replica, ReplicaGone, RequestRefused
from megatron_rl.sampler.protocol import SamplerError
from megatron_rl.types import SamplingParams

PARAMS = SamplingParams(samples=2, max_tokens=4)


@dataclass
class Scripted(Replica):
    """Answers with the prompt's own tokens; dies at its n-th request, or refuses, or hangs."""

    dies_at: int | None = None
    refuses: bool = False
    hangs: bool = False
    pause_s: float = 0.0
    stamp: int = 0
    asked: list[int] = field(default_factory=list)
    most: int = 0

    async def generate(self, token_ids, seed, params):
        self.asked.append(seed)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self.pause_s)
        if self.hangs:
            await asyncio.sleep(60)
        if self.dies_at is not None and len(self.asked) >= self.dies_at:
            raise ReplicaGone("killed")
        if self.refuses:
            raise SamplerError("refused (400)")
        return [Answer((*token_ids, sample), (0.0,), "stop", self.stamp) for sample in range(params.samples)]


def replica(name="a", ready=True, version=0, **script) -> Scripted:
    one = Scripted(name, Format.none, "", "", 1.0, **script)
    one.ready, one.version = ready, version
    return one


def run(replicas, count=8, *, version=0, patience_s=0.3, max_sequences=4, during=None) -> Dispatched:
    async def main() -> Dispatched:
        changed = asyncio.Event()

        def gone(one: Replica, reason: str) -> None:
            one.take_out(reason)
            changed.set()

        dispatcher = Dispatcher(
            replicas,
            [Job((index,), index, f"prompt {index}") for index in range(count)],
            PARAMS,
            version=version,
            max_sequences=max_sequences,
            patience_s=patience_s,
            changed=changed,
            on_gone=gone,
        )
        helper = asyncio.create_task(during(changed, gone)) if during else None
        try:
            return await asyncio.wait_for(dispatcher.run(), 10)
        finally:
            if helper:
                helper.cancel()

    return asyncio.run(main())


def tokens(result: Dispatched) -> list[list[tuple[int, ...]]]:
    return [[answer.token_ids for answer in done.answers] for done in result.done]


def expected(count: int) -> list[list[tuple[int, ...]]]:
    return [[(index, 0), (index, 1)] for index in range(count)]


def test_work_is_shared_and_comes_back_in_order():
    both = [replica("a"), replica("b")]
    result = run(both, 20)
    assert tokens(result) == expected(20)
    assert result.retried == 0
    assert all(len(one.asked) >= 8 for one in both)
    assert all(one.load == 0 and not one.running for one in both)
    assert all(one.most <= 2 for one in both), "no more than it decodes at once, and a little"


def test_the_least_loaded_server_is_next():
    idle, busy = replica("idle"), replica("busy")
    busy.load = 20  # ten prompts of somebody else
    run([busy, idle], 20, max_sequences=100)
    assert (len(idle.asked), len(busy.asked)) == (15, 5)


def test_the_faster_server_answers_more():
    fast, slow = replica("fast", pause_s=0.002), replica("slow", pause_s=0.05)
    assert tokens(run([fast, slow], 40)) == expected(40)
    assert len(fast.asked) > 2 * len(slow.asked)


@settings(max_examples=40, deadline=None)
@given(
    deaths=st.lists(st.one_of(st.none(), st.integers(1, 6)), min_size=1, max_size=4),
    count=st.integers(1, 20),
    max_sequences=st.integers(1, 12),
)
def test_whoever_dies_every_prompt_is_answered_once(deaths, count, max_sequences):
    replicas = [replica(str(i), dies_at=death) for i, death in enumerate(deaths)] + [replica("survivor")]
    assert tokens(run(replicas, count, max_sequences=max_sequences)) == expected(count)


def test_a_hanging_server_that_is_found_gone_gives_its_prompts_back():
    hanging, other = replica("hanging", hangs=True), replica("other")

    async def find_out(changed, gone):
        await asyncio.sleep(0.05)
        gone(hanging, "did not answer 3 times in a row")

    result = run([hanging, other], 6, during=find_out)
    assert tokens(result) == expected(6)
    assert result.retried == len(hanging.asked) > 0


def test_a_server_that_is_behind_is_not_asked_and_one_that_lies_about_it_is_taken_out():
    behind, lying, current = replica("behind", version=3), replica("lying", version=4, stamp=3), replica("c", version=4)
    current.stamp = 4
    result = run([behind, lying, current], 6, version=4)
    assert tokens(result) == expected(6)
    assert behind.asked == []
    assert not lying.ready
    assert "policy version 3, not 4" in lying.reason


def test_a_refused_request_is_an_error_at_once():
    with pytest.raises(SamplerError, match="refused"):
        run([replica(refuses=True), replica("b")])


def test_a_prompt_that_kills_every_server_is_given_up():
    with pytest.raises(SamplerError, match=f"given up: {TRIES} tries.*killed"):
        run([replica(str(i), dies_at=1) for i in range(TRIES + 1)], 1)


def test_with_no_server_left_the_error_says_what_became_of_them_and_what_to_do():
    only = replica("server 0", dies_at=2)
    with pytest.raises(SamplerError, match=r"no server.*server 0: killed.*max_num_seqs.*sampler\.start_timeout_s"):
        run([only], 4)


def test_servers_that_were_given_up_are_not_waited_for():
    ended = replica("server 0", ready=False)
    ended.given_up = "given up after 3 restarts"
    with pytest.raises(SamplerError, match="given up after"):
        run([ended], 1, patience_s=60)


def test_a_server_that_comes_back_is_used():
    only = replica(dies_at=2)

    async def restart(changed, gone):
        while only.ready:
            await asyncio.sleep(0.01)
        only.dies_at, only.ready, only.version = None, True, 0
        changed.set()

    assert tokens(run([only], 6, during=restart, patience_s=5)) == expected(6)


@pytest.mark.fault("a prompt that no server takes", "the run ends with one refusal, which names it; no server is lost")
def test_a_refused_prompt_is_named_and_takes_no_server_with_it():
    class Strict(Scripted):
        async def generate(self, token_ids, seed, params):
            if token_ids == (5,):
                self.asked.append(seed)
                raise RequestRefused(f"{self.name} refused /inference/v1/generate (400): 5 is beyond the vocabulary")
            return await super().generate(token_ids, seed, params)

    both = [Strict(name, Format.none, "", "", 1.0) for name in "ab"]
    for one in both:
        one.ready, one.version = True, 0
    with pytest.raises(
        SamplerError, match=r"prompt 5 of 1 tokens cannot be answered: . refused .*beyond the vocabulary"
    ):
        run(both)
    assert all(one.ready for one in both)
    assert sum(one.asked.count(5) for one in both) == 1
