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
from megatron_rl.sampler.fleet import replica as module
from megatron_rl.sampler.fleet.replica import Replica, ReplicaGone, RequestRefused, Swap
from megatron_rl.sampler.fleet.supervisor import FleetState, Supervisor
from megatron_rl.types import SamplingParams

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
    monkeypatch.setattr(module, "HEALTH_TIMEOUT_S", 0.3)
    command = [sys.executable, "-c", f"import time; print(1, flush=True)\n{child}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def use(replica: Replica, asked: list[str]):
        process.stdout.readline()
        await asyncio.sleep(0.2)  # it goes on from there to what it does
        replica.process = SimpleNamespace(pid=process.pid, ended=lambda: None)
        return await replica.look()

    try:
        assert with_server([(SILENT, None)], use).alive == works
    finally:
        process.kill()
        process.communicate()
