"""Replies of an engine as a sampler reads them, and missing replies."""

import asyncio
import math
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from recorded_line import (
    NAME,
    PARAMS,
    SAMPLE,
    Frames,
    encode,
    generate,
    replied,
    sampled,
    with_replies,
)
from scripted_engine import until

from megatron_rl.engine.messages import Generate
from megatron_rl.sampler.client import engine_client as module
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.interface import (
    EngineTimeout,
    EngineUnavailable,
    RequestRefused,
    SamplerError,
)
from megatron_rl.types import SamplingParams, ToolFormat
from megatron_rl.weight_sync.manifest import WeightSyncError

DEEP = b"\x91" * 200_000  # lists in lists


def lied(sample: dict[str, Any], params: SamplingParams = PARAMS) -> str:
    """Return the error about an engine with this reply."""

    async def use(engine: EngineClient) -> str:
        with pytest.raises(EngineUnavailable, match=r"^server 0 \(int8\)") as raised:
            await generate(engine, params)
        return str(raised.value)

    return with_replies(lambda frames: replied(frames, sample), use)


def ints(*values: int) -> Any:
    return array("i", values)


def floats(*values: float) -> Any:
    return array("f", values)


LIES = {
    "a token beyond the vocabulary": {"token_ids": ints(5, 100)},
    "more tokens than were asked for": {
        "token_ids": ints(5, 5, 5),
        "logprobs": floats(-1, -1, -1),
    },
    "a logprob too few": {"logprobs": floats(-1)},
    "a probability above one": {"logprobs": floats(-1, 5)},
    "candidates that were not requested": {"kept_ids": ints(5, 6), "kept_counts": ints(1, 1)},
    "top tokens that were not requested": {"top_ids": ints(5, 6)},
    "a version of no token": {"versions": ints(4, 4)},
    "versions of more tokens": {"versions": ints(3, 3, 4)},
    "a version that there cannot be": {"policy_version": 1 << 31},
    "an unknown finish reason": {"finish_reason": "<script>" * 1000},
    "an array of nothing known": {"logprobs": ["Q", b"12345678"]},
    "half a number": {"logprobs": ["f", b"123"]},
    "no array": {"token_ids": ["i", [5, 1 << 40]]},
    "experts of fewer tokens": {"experts_SLK": np.zeros((2, 1, 1), np.uint8)},
    "experts of another shape": {"experts_SLK": ["|u1", [-1, 0], b"abc"]},
    "a thousand levels": {"content": DEEP},
}


@pytest.mark.fault(
    "a server answers with what cannot have been sampled", "it counts as gone, in a short sentence"
)
@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_have_been_sampled(lie: str) -> None:
    tracemalloc.start()
    try:
        assert len(lied(SAMPLE | LIES[lie])) < 400
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.fault("a server sends garbage", "every request fails, and names it as terminated")
@pytest.mark.parametrize(
    "content", [DEEP, encode([{"id": 1, "error": "x"}])], ids=lambda content: repr(content[:12])
)
def test_garbage(content: bytes) -> None:
    async def use(engine: EngineClient) -> None:
        asked = [
            generate(engine),
            engine.update("abort"),
            engine.update("finish"),
            engine.status(),
        ]
        said = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in said} == {EngineUnavailable}
        assert all(str(one).startswith(NAME) and len(str(one)) < 400 for one in said)
        with pytest.raises(EngineUnavailable):
            await engine.status()

    with_replies(lambda frames: content, use)


def test_replies_without_a_request_are_dropped() -> None:
    def answer(frames: Frames) -> bytes:
        number = frames[0]["id"]
        more = [
            {"id": number + 7, "value": 1},
            {"id": number, "value": SAMPLE},
            {"id": number, "value": 5},
        ]
        return encode([*more, {"id": number, "error": {"type": "x", "message": "y"}}])

    async def use(engine: EngineClient) -> None:
        await sampled(engine)
        await sampled(engine)

    with_replies(answer, use)


def test_candidates_are_as_many_as_were_asked_for_and_of_the_vocabulary() -> None:
    params = replace(PARAMS, candidates=3)
    kept = {"kept_ids": ints(5, 6, 7, 6), "kept_counts": ints(3, 1)}
    one = with_replies(
        lambda frames: replied(frames, SAMPLE | kept), lambda engine: generate(engine, params)
    )
    assert (list(one.kept_ids), list(one.kept_counts)) == ([5, 6, 7, 6], [3, 1])
    for change, why in (
        ({"kept_ids": ints(5, 6, 7, 8), "kept_counts": ints(4, 0)}, "than the 3"),
        ({"kept_ids": ints(5, 6, 100, 6)}, "token 100"),
        ({"kept_counts": ints(3, 2)}, "add up"),
        ({"kept_counts": None}, "missing"),
    ):
        assert why in lied(SAMPLE | kept | change, params)


def test_top_logprobs_are_sorted_and_add_up() -> None:
    params = replace(PARAMS, top_logprobs=3)
    halves = np.array([-0.5, -0.5, -9.0, math.nan], np.float16)
    top = {"top_counts": array("h", [3, 1]), "top_ids": ints(5, 6, 7, 6), "top_logprobs": halves}
    one = with_replies(
        lambda frames: replied(frames, SAMPLE | top), lambda engine: generate(engine, params)
    )
    assert (list(one.top_counts), list(one.top_ids)) == ([3, 1], [5, 6, 7, 6])
    assert one.top_logprobs.dtype == np.float16
    np.testing.assert_array_equal(one.top_logprobs, halves)
    rising = np.array([-0.5, -0.6, -0.5, -0.1], np.float16)
    for change, why in (
        ({"top_counts": array("h", [4, 0])}, "not 1 to 3"),
        ({"top_counts": array("h", [3, 2])}, "add up"),
        ({"top_counts": array("h", [3])}, "add up"),
        ({"top_ids": ints(5, 6, 100, 6)}, "token 100"),
        ({"top_ids": ints(5, 6, 7)}, "each of 3"),
        ({"top_logprobs": np.zeros(4, np.int16)}, "one float16"),
        ({"top_logprobs": halves.reshape(2, 2)}, "one float16"),
        ({"top_logprobs": rising}, "descending"),
        ({"top_logprobs": -halves}, "no logprobs"),
        ({"top_logprobs": np.full(4, -np.inf, np.float16)}, "no logprobs"),
        ({"top_logprobs": None}, "missing"),
        ({"top_counts": None}, "missing"),
    ):
        assert why in lied(SAMPLE | top | change, params), why


def test_experts_are_those_of_all_tokens_that_were_read() -> None:
    """Two prompt tokens and the first of two sampled tokens; the last one was not read."""
    for dtype in (np.uint8, np.int16, np.uint16):
        experts_SLK = np.arange(12, dtype=dtype).reshape(3, 2, 2)
        sample = SAMPLE | {"experts_SLK": experts_SLK}
        one = with_replies(lambda frames, sample=sample: replied(frames, sample), generate)
        assert one.experts_SLK.dtype == dtype
        assert (one.experts_SLK == experts_SLK).all()
    assert "for 3 tokens" in lied(SAMPLE | {"experts_SLK": experts_SLK[:2]}, PARAMS)


def test_a_refused_request_does_not_terminate_the_engine() -> None:
    def refusing(kind: str) -> Callable[[Frames], bytes]:
        return lambda frames: encode(
            [{"id": frames[0]["id"], "error": {"type": kind, "message": "no: " + "x" * 9999}}]
        )

    for kind, error in (
        ("Refused", RequestRefused),
        ("WeightSyncError", WeightSyncError),
        ("OSError", SamplerError),
    ):
        with pytest.raises(error, match=r"no: x+$") as raised:
            with_replies(refusing(kind), lambda engine: engine.update("stage", update_info={}))
        assert type(raised.value) is error
        assert len(str(raised.value)) < 5000


def test_requests_and_cancellations_of_one_iteration_are_sent_together() -> None:
    async def use(engine: EngineClient) -> None:
        line = engine.line
        samples = [asyncio.ensure_future(generate(engine)) for _ in range(4)]
        await until(lambda: line.sent)
        for failed in (samples[:2], samples[2:3]):
            for one in failed:
                one.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert [one["method"] for one in line.sent] == ["generate"] * 4 + ["cancel"] * 2
        assert [one["arguments"] for one in line.sent[4:]] == [
            {"requests": [1, 2]},
            {"requests": [3]},
        ]
        line.received(replied(line.sent[:4]))
        await samples[3]

    with_replies(lambda frames: None, use)


def test_a_request_has_everything_that_a_sample_depends_on() -> None:
    tools = ToolFormat("hermes", "[]")
    params = SamplingParams(
        3,
        2,
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        stop_token_ids=(4,),
        candidates=3,
        top_logprobs=8,
        top_mass=0.9,
        tools=tools,
    )
    wanted = asdict(params) | {
        "tokens": [1, 2],
        "seed": 7,
        "stop_token_ids": [4],
        "policy_version": 3,
        "patient": True,
    }
    del wanted["samples"]

    async def use(engine: EngineClient) -> None:
        with pytest.raises(EngineUnavailable):  # the reply has no candidates
            await generate(engine, params)
        (asked,) = engine.line.sent
        assert asked["arguments"] == wanted
        assert wanted.keys() == set(Generate.__struct_fields__)

    with_replies(replied, use)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Clock of event loops, advanced by hand."""
    passed = SimpleNamespace(s=0.0)
    real = asyncio.BaseEventLoop.time
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: real(loop) + passed.s)
    return passed


@pytest.mark.fault(
    "an engine does not answer in time",
    "it counts as gone; the sentence names the request and the key",
)
def test_every_request_has_a_limit(clock: SimpleNamespace) -> None:
    async def use(engine: EngineClient) -> None:
        for ask, method in (
            (engine.update("await"), "await_weight_update"),
            (engine.sleep(1), "sleep"),
        ):
            asked = asyncio.ensure_future(ask)
            await asyncio.sleep(0)
            clock.s += 30
            with pytest.raises(
                EngineTimeout, match=rf"`{method}` within sampler\.request_timeout_s=30"
            ):
                await asked
        with pytest.raises(EngineTimeout, match=r"`start` within sampler\.start_timeout_s=0\.2"):
            await engine.start({}, 0.2)

    with_replies(lambda frames: None, use)


@pytest.mark.fault(
    "a server drains its queue, then stops replying", "waited for, then marked terminated"
)
def test_a_deadline_does_not_count_the_engine_s_queue(clock: SimpleNamespace) -> None:
    """It answers one request at a time, and each takes two thirds of the limit."""

    async def use(engine: EngineClient) -> None:
        line = engine.line
        samples = [asyncio.ensure_future(generate(engine)) for _ in range(640)]
        await until(lambda: len(line.sent) == 640)
        for frame, sample in zip(list(line.sent), samples, strict=True):
            clock.s += 20
            for _ in range(5):
                await asyncio.sleep(0)
            line.received(replied([frame]))
            await sample
        last = asyncio.ensure_future(generate(engine))
        await until(lambda: len(line.sent) == 641)
        await gone(engine, last, clock)

    with_replies(lambda frames: None, use)


async def gone(engine: EngineClient, last: asyncio.Future[Any], clock: SimpleNamespace) -> None:
    """Neither is anything finished, nor is there an answer to whether something was written."""
    line = engine.line
    clock.s += 30
    await until(lambda: line.sent[-1]["method"] == "status")
    clock.s += module.HEALTH_TIMEOUT_S
    with pytest.raises(EngineTimeout, match=r"sampler\.request_timeout_s=30"):
        await last


@pytest.mark.fault(
    "one answer takes longer than an answer may", "the engine is waited for as long as it writes"
)
def test_an_engine_that_writes_is_not_late(clock: SimpleNamespace) -> None:

    async def use(engine: EngineClient) -> None:
        line = engine.line
        sample = asyncio.ensure_future(generate(engine))
        await until(lambda: line.sent)
        for written in (*range(10), 9):
            asked = len(line.sent)
            clock.s += 30
            await until(lambda asked=asked: len(line.sent) > asked)
            line.received(replied(line.sent[-1:], {"written": written}))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineTimeout, match="finished no response"):
            await sample

    with_replies(lambda frames: None, use)


def test_a_deadline_begins_with_a_question(clock: SimpleNamespace) -> None:
    """However long nothing was asked before."""

    async def use(engine: EngineClient) -> None:
        line = engine.line
        first = asyncio.ensure_future(generate(engine))
        await until(lambda: line.sent)
        line.received(replied(line.sent))
        await first
        clock.s += 65
        await asyncio.sleep(0.01)  # no request waits at the deadline
        sample = asyncio.ensure_future(generate(engine))
        await until(lambda: len(line.sent) == 2)
        clock.s += 20
        await asyncio.sleep(0.01)
        assert len(line.sent) == 2, "no health check has been sent yet"
        await gone(engine, sample, clock)

    with_replies(lambda frames: None, use)
