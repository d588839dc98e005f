"""What the fleet makes of a server's answers, and of connections that end without one."""

import asyncio
import gzip
import json
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from megatron_rl.sampler.fleet import replica as module
from megatron_rl.sampler.fleet.answers import Answer, read_answers
from megatron_rl.sampler.fleet.replica import NoAnswer, Replica, ReplicaGone, RequestRefused, Swap
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor

from megatron_rl.config.schema import Cache, Format
from megatron_rl.processes.process import state_of
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION

CHOICE = {
    "index": 0,
    "token_ids": [5, 6],
    "finish_reason": "length",
    "weight_versions": [{"version": "3", "start": 0, "end": 2}],
}
ANSWER = {"choices": [CHOICE | {"logprobs": {"content": [{"logprob": -1.0}, {"logprob": -9999.0}]}}]}
PARAMS = SamplingParams(samples=1, max_tokens=2)
RESET, HANG_UP, SILENT = 0, 1, 2  # in the place of a status
GZIP = b"\x1f\x8b"
DEEP = b"[" * 200_000


def with_server(replies: list[tuple[int, object]], use: Callable[[Replica, list[str]], Awaitable[object]]) -> object:
    """A server that gives these replies in turn, on one connection as long as it lasts."""

    async def main() -> object:
        asked: list[str] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0] or 0)
                await reader.readexactly(length)
                asked.append(head.split()[1])
                status, content = replies.pop(0)
                if status in (RESET, HANG_UP):
                    if status == RESET:
                        place = writer.get_extra_info("socket")
                        place.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    writer.close()
                    return
                if status == SILENT:
                    continue
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                kind = b"content-encoding: gzip\r\n" if body[:2] == GZIP else b""
                writer.write(b"HTTP/1.1 %d x\r\n%bcontent-length: %d\r\n\r\n" % (status, kind, len(body)) + body)

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            replica = Replica("server 0 (int8)", Format.int8, f"http://127.0.0.1:{port}", "k" * 32, 30.0)
            try:
                return await use(replica, asked)
            finally:
                await replica.close()

    return asyncio.run(main())


async def generate(replica: Replica, asked: list[str]) -> list[str]:
    (answer,) = await replica.generate((1, 2), 7, PARAMS)
    assert (answer.token_ids, answer.spans, answer.logprobs[0]) == ((5, 6), ((3, 2),), -1.0)
    return asked


@pytest.mark.fault("a connection ends under a request", "one more try on a new one; the server stays")
@pytest.mark.parametrize("end", [RESET, HANG_UP])
def test_a_lost_connection_is_tried_again(end):
    assert len(with_server([(end, None), (200, ANSWER)], generate)) == 2
    assert len(with_server([(200, ANSWER), (end, None), (200, ANSWER)], lambda *two: twice(*two))) == 3
    with pytest.raises(ReplicaGone, match=r"server 0 \(int8\): /inference"):
        with_server([(end, None), (end, None)], generate)


async def twice(replica: Replica, asked: list[str]) -> list[str]:
    await generate(replica, asked)
    return await generate(replica, asked)


@pytest.mark.fault("a connection ends and the server's process has ended", "no second try")
def test_nobody_asks_a_dead_process_twice():
    async def use(replica: Replica, asked: list[str]) -> int:
        replica.process = SimpleNamespace(ended=lambda: "its process ended (exit status -9)")
        with pytest.raises(ReplicaGone):
            await replica.generate((1, 2), 7, PARAMS)
        return len(asked)

    assert with_server([(HANG_UP, None), (200, ANSWER)], use) == 1


@pytest.mark.fault("a server works off its queue, then answers nobody any more", "waited for; then it is gone")
def test_a_deadline_does_not_count_the_server_s_queue():
    """It answers one request at a time; on the loop's clock each takes two thirds of the limit."""
    limit_s, passed_s = 600.0, 0.0

    async def main() -> None:
        nonlocal passed_s
        asyncio.get_running_loop().time = lambda: time.monotonic() + passed_s
        turn = asyncio.Semaphore()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal passed_s
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            await reader.readexactly(int(head.lower().partition("content-length: ")[2].partition("\r\n")[0]))
            await turn.acquire()
            passed_s += limit_s * 2 / 3
            body = json.dumps(ANSWER).encode()
            writer.write(b"HTTP/1.1 200 x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            writer.close()

        async def ask() -> None:
            await replica.generate((1, 2), 7, PARAMS)
            turn.release()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            replica = Replica("a", Format.int8, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "k", limit_s)
            try:
                await asyncio.gather(*(ask() for _ in range(5)))
                await turn.acquire()
                last = asyncio.ensure_future(ask())
                await asyncio.sleep(0.01)
                passed_s += limit_s
                with pytest.raises(NoAnswer, match=r"a finished no answer for 600 s"):
                    await last
            finally:
                await replica.close()

    asyncio.run(main())


def test_loading_weights_is_asked_for_once():
    """It may have happened before the connection ended."""

    async def use(replica: Replica, asked: list[str]) -> list[str]:
        with pytest.raises(ReplicaGone):
            await replica.finish_update(Swap())
        return asked

    assert with_server([(HANG_UP, None), (503, {}), (503, {})], use) == ["/collective_rpc"] * 2


STATE = {"policy_version": 3, "torn": False, "verify_s": 0.1, "load_s": 0.1, "nbytes": 1}


@pytest.mark.fault("a server does not reset its prefix cache after an update", "it is taken out")
@pytest.mark.parametrize("cache", list(Cache))
def test_prefixes_of_the_old_weights_are_not_answered_from(cache):
    """With `keep`, answers that are being written hold on to theirs."""

    async def use(replica: Replica, asked: list[str]) -> str:
        try:
            await replica.finish_update(Swap(cache=cache))
        except ReplicaGone as error:
            return str(error)
        return ""

    loaded = [(200, {"results": [None]}), (200, {"results": [STATE]})]
    said = with_server([*loaded, (200, {"success": False}), (200, {})], use)
    assert said == "" if cache == Cache.keep else "prefix cache" in said
    assert with_server([*loaded, (200, {"success": True}), (200, {})], use) == ""


@pytest.mark.parametrize("load", [0, 2])
def test_an_update_is_verified_beside_answers_that_are_being_written(load):
    bodies: list[dict] = []

    async def use(replica: Replica, asked: list[str]) -> None:
        post = replica.post

        async def noted(path, body=None, *, again=True):
            bodies.append(body)
            return await post(path, body, again=again)

        replica.post, replica.load = noted, load
        await replica.stage_update({"directory": "/sync"})

    replies = [{"results": [None]}, {"results": ["True"]}, {"results": ["False"]}, {"results": [None]}]
    with_server([(200, content) for content in (replies if load else replies[:1])], use)
    update, *looks = ((body["method"], *body["args"]) for body in bodies)
    assert update[2]["update_info"] == ({"directory": "/sync", "background": True} if load else {"directory": "/sync"})
    expected = [("weight_update_building",)] * 2 + [("guarded_call", "await_weight_update", {})]
    assert looks == (expected if load else [])


@pytest.mark.fault("an update that is verified beside answers never ends", "the server counts as gone")
def test_a_verification_has_a_limit():
    async def use(replica: Replica, asked: list[str]) -> None:
        replica.load, replica.timeout_s = 2, 0.2
        with pytest.raises(NoAnswer, match=r"did not verify the update within 0\.2 s"):
            await replica.stage_update({"directory": "/sync"})

    with_server([(200, {"results": [None]}), *[(200, {"results": ["True"]})] * 99], use)


@pytest.mark.parametrize(
    ("status", "body", "alive", "slow"),
    [
        (200, {"engine": "answers"}, True, ""),
        (200, {}, True, ""),
        (200, {"engine": "busy"}, True, "its engine is busy"),
        (503, {"error": "its engine neither answers nor works"}, False, "neither answers nor works"),
        (401, {}, False, "401"),
        (200, [], False, "object"),
        (200, b'{"x": ' + DEEP, False, "Expected"),
        (200, {"engine": 5}, False, "str"),
    ],
)
def test_a_look_tells_busy_from_hung(status, body, alive, slow):
    async def use(replica: Replica, asked: list[str]):
        return await replica.look()

    look = with_server([(status, body)], use)
    assert look.alive == alive
    assert slow in look.slow
    assert bool(look.slow) == bool(slow)


def test_a_refused_request_is_no_dead_server():
    with pytest.raises(RequestRefused, match="beyond the vocabulary"):
        with_server([(400, {"error": "token_ids: 101 is beyond the vocabulary"})], generate)


@pytest.mark.fault("a server given by address answers without the key", "it is refused")
def test_a_given_server_that_asks_for_no_key_is_refused():
    async def use(replica: Replica, asked: list[str]) -> None:
        with pytest.raises(ReplicaGone, match="without the key; start it with `megatron-rl serve`"):
            await Supervisor(replica, None, FleetState(1.0, 48, print))._check_given()

    with_server([(200, {"weight_version": "3"})], use)


@pytest.mark.fault(
    "a server gives no answer in time", "it is busy if its process had a core meanwhile, else the look is missed"
)
@pytest.mark.parametrize(("child", "works"), [("while True: time.sleep(0.01)", True), ("time.sleep(100)", False)])
def test_a_server_that_is_starved_is_not_hung(monkeypatch, child, works):
    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 3.0 if works else 0.3)
    command = [sys.executable, "-c", f"import time; print(1, flush=True)\n{child}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def use(replica: Replica, asked: list[str]):
        process.stdout.readline()
        while not works and state_of(process.pid) != "S":  # it goes on from there to what it does
            await asyncio.sleep(0.01)
        replica.process = SimpleNamespace(pid=process.pid, ended=lambda: None)
        return await replica.look()

    try:
        assert with_server([(SILENT, None)], use).alive == works
    finally:
        process.kill()
        process.communicate()


def test_spans_of_versions_become_versions_of_tokens():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 5}]

    def read(spans, tokens=5) -> Answer:
        choice = CHOICE | {"token_ids": [5] * tokens, "weight_versions": spans}
        (answer,) = read_answers(json.dumps({"choices": [choice]}).encode(), SamplingParams(1, 5), 8)
        return answer

    assert (read(spans).oldest, list(read(spans).versions)) == (3, [3, 3, 4, 4, 4])
    assert read(spans[:1], 2).versions is None
    assert read(None, 2).spans == ((NO_VERSION, 2),)
    assert read([{"version": "main", "start": 0, "end": 2}], 2).spans == ((NO_VERSION, 2),)
    assert read([], 0).spans == read(None, 0).spans == ()
    for odd in (spans[:1], spans[1:], spans[::-1], [], [spans[0], spans[1] | {"start": 3}], [*spans, spans[1]]):
        with pytest.raises(ValueError, match="policy versions that do not add up to 5 tokens"):
            read(odd)


def sampled(**changes: object) -> bytes:
    return json.dumps({"choices": [ANSWER["choices"][0] | changes]}).encode()


def with_logprobs(*values: object, top: int = 0) -> bytes:
    content = [{"logprob": value, "top_logprobs": [{"token_id": 1, "logprob": -1.0}] * top} for value in values]
    return sampled(logprobs={"content": content})


def span(start: int, end: int, version: str = "3") -> dict[str, object]:
    return {"version": version, "start": start, "end": end}


LIES = {
    "a token beyond the vocabulary": sampled(token_ids=[5, 100]),
    "a token below it": sampled(token_ids=[5, -1]),
    "a token of thirty digits": sampled(token_ids=[5, 10**30]),
    "more tokens than were asked for": sampled(token_ids=[5] * 3, weight_versions=[span(0, 3)]),
    "a probability above one": with_logprobs(-1.0, 5.0),
    "a huge one": with_logprobs(-1.0, 1e308),
    "a span of a negative length": sampled(weight_versions=[span(0, 5), span(5, 2)]),
    "a span that begins before the answer": sampled(weight_versions=[span(-1, 2)]),
    "a version of thousands of digits": sampled(weight_versions=[span(0, 2, "9" * 5000)]),
    "an end that nobody knows": sampled(finish_reason="<script>" * 1000),
    "a sample twice": json.dumps({"choices": [ANSWER["choices"][0]] * 2}).encode(),
    "another sample": sampled(index=7),
    "nested brackets": b'{"x": ' + DEEP[:50_000],
    "a body without end": sampled() + b" " * (1 << 20),
    "a packed one": gzip.compress(b" " * (64 << 20)),
}


@pytest.mark.fault("a server answers with what cannot have been sampled", "it counts as gone, in a short sentence")
@pytest.mark.parametrize("lie", LIES)
def test_what_cannot_have_been_sampled(lie: str) -> None:
    async def use(replica: Replica, asked: list[str]) -> str:
        replica.vocabulary = 100
        tracemalloc.start()
        with pytest.raises(ReplicaGone, match=r"^server 0 \(int8\)") as raised:
            await replica.generate((1, 2), 7, PARAMS)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()
        return str(raised.value)

    assert len(with_server([(200, LIES[lie])], use)) < 400


def test_candidates_are_as_many_as_were_asked_for_and_of_the_vocabulary() -> None:
    params = SamplingParams(samples=1, max_tokens=2, candidates=3)
    assert read_answers(with_logprobs(-1.0, -9999.0, top=3), params, 8)[0].kept is not None
    for content, vocabulary in ((with_logprobs(-1.0, -2.0, top=4), 8), (CANDIDATE_BEYOND, 8)):
        with pytest.raises(ValueError, match=r"more than the 3 candidates|token 9 is beyond"):
            read_answers(content, params, vocabulary)


PAIR = [{"token_id": token, "logprob": -1.0} for token in (5, 9)]
CANDIDATE_BEYOND = sampled(logprobs={"content": [{"logprob": -1.0, "top_logprobs": PAIR}] * 2})


@pytest.mark.fault("a server answers other questions with garbage", "it counts as gone, by name")
@pytest.mark.parametrize(
    "body", [DEEP, b"", b"[]", {"results": []}, {"results": [1]}, {"results": [{"policy_version": -7}]}]
)
def test_garbage_for_what_workers_say(body: object) -> None:
    async def use(replica: Replica, asked: list[str]) -> None:
        for ask in (lambda: replica.call_workers("abort_weight_update"), lambda: replica.finish_update(Swap())):
            with pytest.raises(ReplicaGone, match=r"server 0 \(int8\)"):
                await ask()

    with_server([(200, body)] * 3, use)
