"""What a sampler makes of an engine's replies, of their absence, and of connections that end without one."""

import asyncio
import hashlib
import socket
import struct
import subprocess
import sys
import tracemalloc
from array import array
from base64 import b64encode
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import web
from scripted_engine import until

from megatron_rl.config.schema import Format
from megatron_rl.engine.messages import LONGEST_TRANSMISSION
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.processes.process import state_of
from megatron_rl.sampler import client as module
from megatron_rl.sampler.client import EngineClient, Line, PortLine, SocketLine
from megatron_rl.sampler.engine import Completion, EngineGone, Look, NoAnswer, RequestRefused, SamplerError
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.supervisor import SamplerState, Supervisor
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync.manifest import WeightSyncError

NAME = "server 0 (int8)"
PARAMS = SamplingParams(samples=1, max_tokens=2)
SAMPLE = {
    "tokens": array("i", [5, 6]).tobytes(),
    "logprobs": array("f", [-1.0, float("nan")]).tobytes(),
    "finish": "length",
    "spans": [(3, 2)],
}
WS_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455
DEEP = b"\x91" * 200_000  # lists in lists
Frames = list[dict[str, Any]]
encode = msgspec.msgpack.encode


def replied(frames: Iterable[dict[str, Any]], value: Any = SAMPLE) -> bytes:
    return encode([{"id": one["id"], "value": value} for one in frames])


class ToldLine(Line):
    """What is sent is kept; a test says what is received."""

    def __init__(self, answer: Callable[[Frames], bytes | None] = lambda frames: None) -> None:
        super().__init__()
        self.sent: Frames = []
        self._answer = answer

    async def open(self) -> None: ...

    def send(self, content: bytes) -> None:
        frames = msgspec.msgpack.decode(content)
        self.sent += frames
        answer = self._answer(frames)
        if answer is not None:
            asyncio.get_running_loop().call_soon(self.received, answer)

    async def look(self) -> Look:
        return Look(True)

    async def close(self) -> None: ...


def generate(engine: EngineClient, params: SamplingParams = PARAMS) -> Awaitable[Completion]:
    return engine.generate((1, 2), params, 7, version=3, patient=True)


async def sampled(engine: EngineClient) -> None:
    one = await generate(engine)
    assert (list(one.token_ids), one.spans, one.logprobs[0]) == ([5, 6], [(3, 2)], -1.0)


def told(answer: Callable[[Frames], bytes | None], use: Callable[[EngineClient], Awaitable[Any]]) -> Any:
    """`answer`: the reply to each transmission."""

    async def main() -> Any:
        engine = EngineClient(NAME, ToldLine(answer), 30.0, 100)
        try:
            return await use(engine)
        finally:
            await engine.close()

    return asyncio.run(main())


def lied(sample: dict[str, Any] | bytes, params: SamplingParams = PARAMS) -> str:
    """What is said of an engine that answers so."""

    async def use(engine: EngineClient) -> str:
        with pytest.raises(EngineGone, match=r"^server 0 \(int8\)") as raised:
            await generate(engine, params)
        return str(raised.value)

    return told(lambda frames: sample if isinstance(sample, bytes) else replied(frames, sample), use)


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


LIES = {
    "a token beyond the vocabulary": {"tokens": ints(5, 100)},
    "a token below it": {"tokens": ints(5, -1)},
    "a part of a token": {"tokens": ints(5) + b"abc"},
    "more tokens than were asked for": {"tokens": ints(5, 5, 5), "logprobs": floats(-1, -1, -1), "spans": [(3, 3)]},
    "a logprob too few": {"logprobs": floats(-1)},
    "a probability above one": {"logprobs": floats(-1, 5)},
    "a huge one": {"logprobs": floats(-1, float("inf"))},
    "versions of fewer tokens": {"spans": [(3, 1)]},
    "versions of more tokens": {"spans": [(3, 2), (4, 1)]},
    "versions of no token": {"spans": []},
    "a version of no token, in front": {"spans": [(9, 0), (3, 2)]},
    "a span of a negative length": {"spans": [(3, 5), (4, -3)]},
    "a version beyond the numbers": {"spans": [(1 << 40, 2)]},
    "a version below none": {"spans": [(-2, 2)]},
    "an end that nobody knows": {"finish": "<script>" * 1000},
    "text for tokens": {"tokens": "5, 6"},
}


@pytest.mark.fault("a server answers with what cannot have been sampled", "it counts as gone, in a short sentence")
@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_have_been_sampled(lie: str) -> None:
    tracemalloc.start()
    try:
        assert len(lied(SAMPLE | LIES[lie])) < 400
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.fault("a server sends garbage", "it counts as gone, by name, for whatever was asked")
@pytest.mark.parametrize(
    "content",
    [DEEP, b"", b"{}", b"[" * 50_000, encode({}), encode([5]), encode([{"value": 1}]), encode([{"id": "1"}]),
     encode([{"id": 1, "error": "x"}]), encode([]) + b" ", b"\x91\x81\xa2id\xc1"],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_garbage(content: bytes) -> None:
    async def use(engine: EngineClient) -> None:
        asked = [generate(engine), engine.update("abort"), engine.update("finish"), engine.status()]
        said = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(one) for one in said} == {EngineGone}
        assert all(str(one).startswith(NAME) and len(str(one)) < 400 for one in said)
        with pytest.raises(EngineGone):
            await engine.status()

    told(lambda frames: content, use)


@pytest.mark.fault("a server answers other questions with something else", "it counts as gone, by name")
@pytest.mark.parametrize(
    "value", [None, [], 5, {"policy_version": -7}, {"policy_version": "3", "torn": False}, {"written": "x"}]
)
def test_other_questions_have_forms_too(value: Any) -> None:
    async def use(engine: EngineClient) -> None:
        for ask in (engine.update("finish"), engine.status()):
            with pytest.raises(EngineGone, match=r"server 0 \(int8\) answered with something else"):
                await ask

    told(lambda frames: replied(frames, value), use)


def test_what_nobody_has_asked_for_is_dropped() -> None:
    def answer(frames: Frames) -> bytes:
        number = frames[0]["id"]
        more = [{"id": number + 7, "value": 1}, {"id": number, "value": SAMPLE}, {"id": number, "value": 5}]
        return encode([*more, {"id": number, "error": {"type": "x", "message": "y"}}])

    async def use(engine: EngineClient) -> None:
        await sampled(engine)
        await sampled(engine)

    told(answer, use)


def test_spans_of_versions_become_versions_of_tokens() -> None:
    def read(*spans: tuple[int, int]) -> Completion:
        tokens = sum(count for _, count in spans)
        sample = SAMPLE | {"tokens": ints(*[5] * tokens), "logprobs": floats(*[-1.0] * tokens), "spans": spans}
        return told(lambda frames: replied(frames, sample), lambda engine: generate(engine, SamplingParams(1, 5)))

    assert list(read((3, 2), (4, 3)).versions or ()) == [3, 3, 4, 4, 4]
    assert read((3, 2)).versions is None
    assert read((-1, 0)).versions is None, "an answer without a token"


def test_candidates_are_as_many_as_were_asked_for_and_of_the_vocabulary() -> None:
    params = replace(PARAMS, candidates=3)
    kept = {"kept_ids": ints(5, 6, 7, 6), "kept_counts": ints(3, 1)}
    one = told(lambda frames: replied(frames, SAMPLE | kept), lambda engine: generate(engine, params))
    assert (list(one.kept_ids), list(one.kept_counts)) == ([5, 6, 7, 6], [3, 1])
    for change, why in (
        ({"kept_ids": ints(5, 6, 7, 8, 6), "kept_counts": ints(4, 1)}, "more than the 3 candidates"),
        ({"kept_ids": ints(5, 6, 7, 8), "kept_counts": ints(4, 0)}, "more than the 3 candidates"),
        ({"kept_ids": ints(5, 6, 100, 6)}, "token 100 is beyond"),
        ({"kept_counts": ints(3)}, "do not add up"),
        ({"kept_counts": ints(3, 2)}, "do not add up"),
        ({"kept_counts": None}, "is missing"),
    ):
        assert why in lied(SAMPLE | kept | change, params)


def test_what_an_engine_refuses_is_no_dead_engine() -> None:
    def refusing(kind: str) -> Callable[[Frames], bytes]:
        return lambda frames: encode([{"id": frames[0]["id"], "error": {"type": kind, "message": "no: " + "x" * 9999}}])

    for kind, error in (("Refused", RequestRefused), ("WeightSyncError", WeightSyncError), ("OSError", SamplerError)):
        with pytest.raises(error, match=r"server 0 \(int8\): .*no: x+$") as raised:
            told(refusing(kind), lambda engine: engine.update("stage", update_info={}))
        assert type(raised.value) is error
        assert len(str(raised.value)) < 5000


def test_what_is_asked_in_one_turn_travels_together_and_what_is_given_up_is_told() -> None:
    async def use(engine: EngineClient) -> None:
        line = engine.line
        samples = [asyncio.ensure_future(generate(engine)) for _ in range(3)]
        await until(lambda: line.sent)
        assert [one["method"] for one in line.sent] == ["generate"] * 3
        for one in samples[:2]:
            one.cancel()
        await until(lambda: len(line.sent) > 3)
        assert line.sent[3:] == [{"id": 0, "method": "cancel", "arguments": {"requests": [1, 2]}}]
        line.received(replied(line.sent[:3]))
        await samples[2]

    told(lambda frames: None, use)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Of event loops; it is put forward by hand."""
    passed = SimpleNamespace(s=0.0)
    real = asyncio.BaseEventLoop.time
    monkeypatch.setattr(asyncio.BaseEventLoop, "time", lambda loop: real(loop) + passed.s)
    return passed


@pytest.mark.fault("an engine does not answer in time", "it counts as gone; the sentence names the request and the key")
def test_every_request_has_a_limit(clock: SimpleNamespace) -> None:
    async def use(engine: EngineClient) -> None:
        for ask, method in ((engine.update("await"), "await_weight_update"), (engine.sleep(1), "sleep")):
            asked = asyncio.ensure_future(ask)
            await asyncio.sleep(0)
            clock.s += 30
            with pytest.raises(NoAnswer, match=rf"`{method}` within sampler\.request_timeout_s=30"):
                await asked
        with pytest.raises(NoAnswer, match=r"`start` within sampler\.start_timeout_s=0\.2"):
            await engine.start({}, 0.2)

    told(lambda frames: None, use)


@pytest.mark.fault("a server works off its queue, then answers nobody any more", "waited for; then it is gone")
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
        await until(lambda: line.sent[-1]["method"] == "generate")
        await gone(engine, last, clock)

    told(lambda frames: None, use)


async def gone(engine: EngineClient, last: asyncio.Future[Any], clock: SimpleNamespace) -> None:
    """Neither is anything finished, nor is there an answer to whether something was written."""
    line = engine.line
    clock.s += 30
    await until(lambda: line.sent[-1]["method"] == "status")
    clock.s += module.HEALTH_TIMEOUT_S
    with pytest.raises(NoAnswer, match=r"finished no answer within sampler\.request_timeout_s=30"):
        await last


@pytest.mark.fault("one answer takes longer than an answer may", "the engine is waited for as long as it writes")
@pytest.mark.parametrize("end", [9, "x", None])
def test_an_engine_that_writes_is_not_late(clock: SimpleNamespace, end: Any) -> None:
    """`end`: what it says last of how much it has written."""

    async def use(engine: EngineClient) -> None:
        line = engine.line
        sample = asyncio.ensure_future(generate(engine))
        await until(lambda: line.sent)
        for written in (*range(10), end):
            asked = len(line.sent)
            clock.s += 30
            await until(lambda asked=asked: len(line.sent) > asked)
            assert not sample.done()
            line.received(replied(line.sent[-1:], {"written": written}))
        with pytest.raises(NoAnswer, match="finished no answer"):
            await sample

    told(lambda frames: None, use)


def test_a_deadline_begins_with_a_question(clock: SimpleNamespace) -> None:
    """However long nothing was asked before."""

    async def use(engine: EngineClient) -> None:
        line = engine.line
        first = asyncio.ensure_future(generate(engine))
        await until(lambda: line.sent)
        line.received(replied(line.sent))
        await first
        clock.s += 25
        sample = asyncio.ensure_future(generate(engine))
        await until(lambda: len(line.sent) == 2)
        clock.s += 20
        await asyncio.sleep(0.01)
        assert len(line.sent) == 2, "nobody has asked yet whether it writes"
        await gone(engine, sample, clock)

    told(lambda frames: None, use)


def by_socket(use: Callable[[EngineClient, Channel], Awaitable[Any]]) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        engine = EngineClient("engine", SocketLine(ours), 30.0, 100)
        await engine.open()
        try:
            await use(engine, Channel(theirs))
        finally:
            await engine.close()

    asyncio.run(main())


def test_replies_out_of_order_find_their_way() -> None:
    async def use(engine: EngineClient, theirs: Channel) -> None:
        waiting = asyncio.gather(*(engine.call("ask", {"of": i}) for i in range(50)))
        frames = await asyncio.to_thread(theirs.receive, 60)
        assert len({frame["id"] for frame in frames}) == 50
        for frame in reversed(frames):
            theirs.send([{"id": frame["id"], "value": frame["arguments"]["of"]}])
        assert [msgspec.msgpack.decode(value) for value in await waiting] == list(range(50))

    by_socket(use)


def test_the_end_reaches_everybody_once() -> None:
    async def use(engine: EngineClient, theirs: Channel) -> None:
        waiting = [engine.call("ask", {}), engine.call("ask", {}), generate(engine)]
        asked = asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(theirs.receive, 60)
        theirs.close()
        assert {(type(one), str(one)) for one in await asked} == {(EngineGone, "engine: its process ended")}
        with pytest.raises(EngineGone, match="its process ended"):
            await engine.status()

    by_socket(use)


def test_closing_ends_every_wait_and_the_child() -> None:
    async def use(engine: EngineClient, theirs: Channel) -> None:
        asked = asyncio.ensure_future(engine.status())
        await asyncio.to_thread(theirs.receive, 60)
        await engine.close()
        with pytest.raises(EngineGone, match="it was closed"):
            await asked
        with pytest.raises(ChannelClosed):
            await asyncio.to_thread(theirs.receive, 60)

    by_socket(use)


RESET, HANG_UP, VANISH = "reset", "hang up", "vanish"  # in the place of an answer
Script = list[str | bytes | Callable[[Frames], bytes]]


def behind_a_port(
    script: Script,
    use: Callable[[EngineClient, Frames], Awaitable[Any]],
    health: tuple[int, Any] | None = (200, {"engine": "answers"}),
    instances: Iterable[bytes] = (),
) -> Any:
    """A server that answers each transmission by the next line of its script, on one connection as long as it lasts."""
    asked: Frames = []
    names = iter(instances)

    async def converse(request: web.Request) -> web.WebSocketResponse:
        connection = web.WebSocketResponse(compress=False)
        await connection.prepare(request)
        await connection.send_bytes(next(names, b"this one"))
        async for message in connection:
            frames = msgspec.msgpack.decode(message.data)
            asked.append(frames)
            answer = script.pop(0) if script else HANG_UP
            if answer in (RESET, HANG_UP, VANISH):
                if answer == VANISH:
                    await place.stop()
                if answer == RESET:
                    plug = request.transport.get_extra_info("socket")
                    plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                request.transport.abort()
                break
            await connection.send_bytes(answer if isinstance(answer, bytes) else answer(frames))
        return connection

    async def answer_health(request: web.Request) -> web.Response:
        if health is None:
            await asyncio.sleep(240)
        status, content = health
        body = content if isinstance(content, bytes) else msgspec.json.encode(content)
        return web.Response(status=status, body=body)

    async def main() -> Any:
        nonlocal place
        app = web.Application()
        app.add_routes([web.get("/engine", converse), web.get("/health", answer_health)])
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        place = web.TCPSite(runner, "127.0.0.1", 0)
        await place.start()
        engine = EngineClient(NAME, PortLine(place_of(runner), "k" * 32), 30.0, 100)
        try:
            return await use(engine, asked)
        finally:
            await engine.close()
            await runner.cleanup()

    place: Any = None
    return asyncio.run(main())


def place_of(runner: web.AppRunner) -> str:
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


async def once(engine: EngineClient, asked: Frames) -> int:
    await engine.open()
    await sampled(engine)
    return len(asked)


async def twice(engine: EngineClient, asked: Frames) -> int:
    await once(engine, asked)
    return await once(engine, asked)


@pytest.mark.fault("a connection ends under a request", "one more try on a new one; the server stays")
@pytest.mark.parametrize("end", [RESET, HANG_UP])
def test_a_lost_connection_is_tried_again(end: str) -> None:
    assert behind_a_port([end, replied], once) == 2
    assert behind_a_port([replied, end, replied], twice) == 3
    assert behind_a_port([end, replied, end, replied], twice) == 4
    with pytest.raises(EngineGone, match=r"server 0 \(int8\): its connection was lost twice"):
        behind_a_port([end, end, replied], once)


@pytest.mark.fault("a step of a server's engine fails", "the server counts as gone; a child's error is the run's")
def test_samples_that_fail_behind_a_door_are_the_engine_s_fault() -> None:
    def failing(frames: Frames) -> bytes:
        return encode([{"id": one["id"], "error": {"type": "RuntimeError", "message": "CUDA"}} for one in frames])

    with pytest.raises(EngineGone, match="`generate` failed: RuntimeError: CUDA"):
        behind_a_port([failing], once)
    with pytest.raises(SamplerError, match="`generate` failed: RuntimeError: CUDA") as raised:
        told(failing, generate)
    assert type(raised.value) is SamplerError


@pytest.mark.fault("a connection ends and the server's process has ended", "no second try")
def test_nobody_asks_a_dead_process_twice() -> None:
    async def use(engine: EngineClient, asked: Frames) -> int:
        with pytest.raises(EngineGone, match=r"server 0 \(int8\): http.*Connect"):
            await once(engine, asked)
        return len(asked)

    assert behind_a_port([VANISH], use) == 1


@pytest.mark.fault("another server has the address when a connection is opened again", "it is told nothing")
def test_a_server_in_the_place_of_another_is_a_stranger() -> None:
    async def use(engine: EngineClient, asked: Frames) -> int:
        with pytest.raises(EngineGone, match="another server has taken its place"):
            await once(engine, asked)
        return len(asked)

    assert behind_a_port([HANG_UP, replied], use, instances=[b"one", b"other"]) == 1


def test_loading_weights_is_asked_for_once() -> None:
    """It may have happened before the connection ended."""

    async def use(engine: EngineClient, asked: Frames) -> list[str]:
        await engine.open()
        sample = asyncio.ensure_future(generate(engine))
        with pytest.raises(EngineGone, match="the connection ended in `finish_weight_update`"):
            await engine.update("finish")
        await sample
        return [[frame["method"] for frame in frames] for frames in asked]

    assert behind_a_port([HANG_UP, replied], use) == [["generate", "finish_weight_update"], ["generate"]]


@pytest.mark.fault("a server's transmission does not end, or is packed", "it counts as gone; little of it is kept")
@pytest.mark.parametrize("header", [b"\x82\x7f" + struct.pack(">Q", LONGEST_TRANSMISSION + 1), b"\xc2\x05"])
def test_a_transmission_has_a_limit_and_is_not_packed(header: bytes) -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            key = next(line.split()[1] for line in head.split("\r\n") if line.lower().startswith("sec-websocket-key"))
            accepted = b64encode(hashlib.sha1((key + WS_GUID).encode()).digest())
            writer.write(b"HTTP/1.1 101 x\r\nupgrade: websocket\r\nconnection: upgrade\r\n")
            writer.write(b"sec-websocket-accept: %b\r\n\r\n\x82\x04this" % accepted + header + b"abcde")
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            engine = EngineClient(NAME, PortLine(f"http://127.0.0.1:{port}", "k"), 30.0, 100)
            await engine.open()
            try:
                with pytest.raises(EngineGone, match=r"server 0 \(int8\): "):
                    await generate(engine)
            finally:
                await engine.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "body", "alive", "slow"),
    [
        (200, {"engine": "answers"}, True, ""),
        (200, {"engine": "busy"}, True, "its engine is busy"),
        (503, {"error": "its engine neither answers nor works"}, False, "neither answers nor works"),
        (401, {}, False, "401"),
        (200, [], False, "object"),
        (200, b'{"x": ' + b"[" * 200_000, False, "Error"),
        (200, b" " * (1 << 20), False, "truncated"),
        (200, {"engine": 5}, False, "str"),
    ],
)
def test_a_look_tells_busy_from_hung(status: int, body: Any, alive: bool, slow: str) -> None:
    look = behind_a_port([], lambda engine, asked: engine.look(), (status, body))
    assert look.alive == alive
    assert slow in look.slow
    assert bool(look.slow) == bool(slow)


@pytest.mark.fault(
    "a server gives no answer in time", "it is busy if its process had a core meanwhile, else the look is missed"
)
@pytest.mark.parametrize(("child", "works"), [("while True: time.sleep(0.01)", True), ("time.sleep(100)", False)])
def test_a_server_that_is_starved_is_not_hung(monkeypatch: pytest.MonkeyPatch, child: str, works: bool) -> None:
    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 3.0 if works else 0.3)
    command = [sys.executable, "-c", f"import time; print(1, flush=True)\n{child}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def use(engine: EngineClient, asked: Frames) -> Look:
        process.stdout.readline()
        while not works and state_of(process.pid) != "S":  # it goes on from there to what it does
            await asyncio.sleep(0.01)
        return await Replica(NAME, Format.int8, engine, SimpleNamespace(pid=process.pid)).look()

    try:
        assert behind_a_port([], use, health=None).alive == works
    finally:
        process.kill()
        process.communicate()


@pytest.mark.fault("a server given by address answers without the key", "it is refused")
@pytest.mark.fault("a server given by address takes fewer tokens than the recipe needs", "it is refused")
def test_a_given_server_is_looked_at_before_it_serves() -> None:
    def connecting(key: str, longest: int) -> None:
        async def use(engine: EngineClient, asked: Frames) -> None:
            state = SamplerState(1.0, 30.0, 48, 100, print)
            replica = Replica(NAME, Format.int8, engine)
            try:
                await Supervisor(replica, None, state, engine.line._address, key)._connect()
            finally:
                await replica.engine.close()

        behind_a_port([lambda frames: replied(frames, {"longest": longest})], use)

    connecting("", 48)
    with pytest.raises(EngineGone, match="without the key; start it with `megatron-rl serve`"):
        connecting("k" * 32, 48)
    with pytest.raises(EngineGone, match="takes 47 tokens, the recipe needs 48"):
        connecting("", 47)
