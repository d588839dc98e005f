"""What the fleet makes of a server's answers, and of connections that end without one."""

import asyncio
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest

from megatron_rl.config.schema import Format
from megatron_rl.processes.process import state_of
from megatron_rl.sampler.fleet import replica as module
from megatron_rl.sampler.fleet.answers import Answer, read_answers
from megatron_rl.sampler.fleet.replica import NoAnswer, Replica, ReplicaGone, RequestRefused, Swap
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
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
                body = json.dumps(content).encode()
                writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n" % (status, len(body)) + body)

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


def test_loading_weights_is_asked_for_once():
    """It may have happened before the connection ended."""

    async def use(replica: Replica, asked: list[str]) -> list[str]:
        with pytest.raises(ReplicaGone):
            await replica.finish_update(Swap())
        return asked

    assert with_server([(HANG_UP, None), (503, {}), (503, {})], use) == ["/collective_rpc"] * 2


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
        (answer,) = read_answers(json.dumps({"choices": [choice]}).encode(), 0)
        return answer

    assert (read(spans).oldest, list(read(spans).versions)) == (3, [3, 3, 4, 4, 4])
    assert read(spans[:1], 2).versions is None
    assert read(None, 2).spans == ((NO_VERSION, 2),)
    assert read([{"version": "main", "start": 0, "end": 2}], 2).spans == ((NO_VERSION, 2),)
    assert read([], 0).spans == read(None, 0).spans == ()
    for odd in (spans[:1], spans[1:], spans[::-1], [], [spans[0], spans[1] | {"start": 3}], [*spans, spans[1]]):
        with pytest.raises(ValueError, match="policy versions that do not add up to 5 tokens"):
            read(odd)
