"""A child's socket and a server's port: connections that end, and what can be seen of a
server from outside.
"""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from recorded_line import NAME, Frames, encode, generate, replied, sampled, with_replies

from megatron_rl.config.schema import Format
from megatron_rl.engine.messages import LONGEST_TRANSMISSION
from megatron_rl.processes.channel import Channel, ChannelClosed
from megatron_rl.sampler.client import lines as module
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.interface import EngineUnavailable, SamplerError
from megatron_rl.sampler.client.lines import PortLine, SocketLine
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.supervisor import SamplerState, Supervisor


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


@pytest.mark.parametrize(("ours", "said"), [(True, "it was closed"), (False, "its process ended")])
def test_the_end_reaches_everybody_once(ours: bool, said: str) -> None:
    async def use(engine: EngineClient, theirs: Channel) -> None:
        waiting = [
            engine.call("ask", {}),
            engine.call("ask", {}),
            generate(engine),
        ]
        asked = asyncio.gather(*waiting, return_exceptions=True)
        await asyncio.to_thread(theirs.receive, 60)
        await engine.close() if ours else theirs.close()
        assert {(type(one), str(one)) for one in await asked} == {
            (EngineUnavailable, f"engine: {said}")
        }
        with pytest.raises(EngineUnavailable, match=said):
            await engine.status()
        if ours:
            with pytest.raises(ChannelClosed):
                await asyncio.to_thread(theirs.receive, 60)

    by_socket(use)


# in the place of an answer
RESET = "reset"
HANG_UP = "hang up"
VANISH = "vanish"
Script = list[str | bytes | Callable[[Frames], bytes]]


def behind_a_port(
    script: Script,
    use: Callable[[EngineClient, list[Frames]], Awaitable[Any]],
    health: tuple[int, Any] | None = (200, {"engine": "answers"}),
    instances: Iterable[bytes] = (),
    key: str = "k" * 32,
) -> Any:
    """A server that answers each transmission by the next line of its script, bytes as they are
    on the wire.
    """
    asked = []
    names = iter(instances)

    async def converse(request: web.Request) -> web.WebSocketResponse:
        if request.headers.get("authorization", "Bearer ") != f"Bearer {key}":
            raise web.HTTPUnauthorized
        connection = web.WebSocketResponse(compress=False)
        await connection.prepare(request)
        if instance := next(names, b"this one"):
            await connection.send_bytes(instance)
        async for message in connection:
            asked.append(msgspec.msgpack.decode(message.data))
            answer = script.pop(0)
            if callable(answer):
                await connection.send_bytes(answer(asked[-1]))
            elif isinstance(answer, bytes):
                request.transport.write(answer)
            else:
                if answer == VANISH:
                    await asyncio.gather(*(site.stop() for site in server.runner.sites))
                if answer == RESET:
                    plug = request.transport.get_extra_info("socket")
                    plug.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                request.transport.abort()
        return connection

    async def answer_health(request: web.Request) -> web.Response:
        status, content = health or await asyncio.sleep(240)
        return web.Response(
            status=status, body=content if isinstance(content, bytes) else json.dumps(content)
        )

    app = web.Application()
    app.add_routes([web.get("/engine", converse), web.get("/health", answer_health)])
    server = TestServer(app)

    async def main() -> Any:
        async with server:
            engine = EngineClient(
                NAME, PortLine(str(server.make_url("")).rstrip("/"), key), 30.0, 100
            )
            try:
                return await use(engine, asked)
            finally:
                await engine.close()

    return asyncio.run(main())


async def once(engine: EngineClient, asked: list[Frames]) -> int:
    await engine.open()
    await sampled(engine)
    return len(asked)


async def twice(engine: EngineClient, asked: list[Frames]) -> int:
    await once(engine, asked)
    return await once(engine, asked)


@pytest.mark.fault(
    "a connection ends under a request", "one more try on a new one; the server stays"
)
@pytest.mark.parametrize("end", [RESET, HANG_UP])
def test_a_lost_connection_is_tried_again(end: str) -> None:
    assert behind_a_port([end, replied], once) == 2
    assert behind_a_port([replied, end, replied], twice) == 3
    assert behind_a_port([end, replied, end, replied], twice) == 4
    with pytest.raises(EngineUnavailable, match="lost twice"):
        behind_a_port([end, end, replied], once)


@pytest.mark.fault(
    "a step of a server's engine fails", "the server counts as gone; a child's error is the run's"
)
def test_samples_that_fail_behind_a_door_are_the_engine_s_fault() -> None:
    def failing(frames: Frames) -> bytes:
        return encode(
            [
                {"id": one["id"], "error": {"type": "RuntimeError", "message": "CUDA"}}
                for one in frames
            ]
        )

    with pytest.raises(EngineUnavailable, match="`generate` failed: RuntimeError: CUDA"):
        behind_a_port([failing], once)
    with pytest.raises(SamplerError, match="`generate` failed: RuntimeError: CUDA") as raised:
        with_replies(failing, generate)
    assert type(raised.value) is SamplerError


@pytest.mark.fault("a connection ends and the server's process has ended", "no second try")
def test_a_terminated_process_gets_no_second_request() -> None:
    async def use(engine: EngineClient, asked: list[Frames]) -> int:
        with pytest.raises(EngineUnavailable, match=r"server 0 \(int8\): http.*Connect"):
            await once(engine, asked)
        return len(asked)

    assert behind_a_port([VANISH], use) == 1


@pytest.mark.fault(
    "another server has the address when a connection is opened again", "it is sent nothing"
)
def test_a_server_in_the_place_of_another_is_a_stranger() -> None:
    async def use(engine: EngineClient, asked: list[Frames]) -> int:
        with pytest.raises(EngineUnavailable, match="its place"):
            await once(engine, asked)
        return len(asked)

    assert behind_a_port([HANG_UP, replied], use, instances=[b"one", b"other"]) == 1


def test_loading_weights_is_asked_for_once() -> None:
    """It may have happened before the connection ended."""

    async def use(engine: EngineClient, asked: list[Frames]) -> list[str]:
        await engine.open()
        sample = asyncio.ensure_future(generate(engine))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="`finish_weight_update`"):
            await engine.update("finish")
        await sample
        return [[frame["method"] for frame in frames] for frames in asked]

    assert behind_a_port([HANG_UP, replied], use) == [
        ["generate", "finish_weight_update"],
        ["generate"],
    ]


@pytest.mark.fault(
    "a server's transmission does not end, or is packed", "it counts as gone; little of it is kept"
)
@pytest.mark.parametrize(
    "head", [b"\x82\x7f" + struct.pack(">Q", LONGEST_TRANSMISSION + 1), b"\xc2\x05"]
)
def test_a_transmission_has_a_limit_and_is_not_packed(head: bytes) -> None:
    with pytest.raises(EngineUnavailable, match=r"\((1002|1009)\)"):
        behind_a_port([head + b"abcde"], once)


@pytest.mark.parametrize(
    ("status", "body", "alive", "slow"),
    [
        (200, {"engine": "answers"}, True, ""),
        (200, {"engine": "busy"}, True, "its engine is busy"),
        (503, {"error": "hung"}, False, "hung"),
        (401, {}, False, "401"),
        (200, b'{"x": ' + b"[" * 200_000, False, "Error"),
        (200, b" " * (1 << 20), False, "truncated"),
    ],
)
def test_a_look_tells_busy_from_hung(status: int, body: Any, alive: bool, slow: str) -> None:
    look = behind_a_port([], lambda engine, asked: engine.look(), (status, body))
    assert look.alive == alive
    assert slow in look.slow
    assert bool(look.slow) == bool(slow)


@pytest.mark.fault(
    "a given server answers without the key, takes fewer tokens, or is silent", "it is refused"
)
def test_a_given_server_is_looked_at_before_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def connecting(key: str, longest: int, **server: Any) -> None:
        async def use(engine: EngineClient, asked: list[Frames]) -> None:
            state = SamplerState(0.0, 30.0, 48, 100, print)
            replica = Replica(NAME, Format.int8, engine)
            try:
                await asyncio.wait_for(
                    Supervisor(replica, None, state, engine.line._address, key)._connect(), 60
                )
            finally:
                await replica.engine.close()

        behind_a_port(
            [lambda frames: replied(frames, {"longest": longest})], use, key=key, **server
        )

    connecting("", 48)
    with pytest.raises(EngineUnavailable, match="megatron-rl serve"):
        connecting("k" * 32, 48)
    with pytest.raises(EngineUnavailable, match=r"47 tokens.* 48"):
        connecting("", 47)
    with pytest.raises(EngineUnavailable, match=r"sampler\.start_timeout_s=0; .*503"):
        connecting("", 48, health=(503, {}))
    monkeypatch.setattr(module, "OPEN_S", 0.1)
    with pytest.raises(EngineUnavailable, match=r"0\.1 s"):
        connecting("", 48, instances=[b""])
