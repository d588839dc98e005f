"""A server's door, by a real uvicorn: the key, strangers who never finish a request, and what the
owner may ask.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec
import pytest
from helpers import half_open, http_status, wait_for

from megatron_rl.engine import server, server_access
from megatron_rl.engine.messages import LONGEST_TRANSMISSION
from megatron_rl.engine.server_access import Key, RequireKey
from megatron_rl.processes.unauthenticated import MAX_OPEN

ENGINE = SimpleNamespace(vocabulary=101, longest=48, transport="file")
KEY = "k" * 32
PATIENCE_S = 60
STATUS = {"id": 1, "method": "status", "arguments": {}}
encode = msgspec.msgpack.encode


class Service:
    """Answers at once, in another thread; keeps what it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.left: list[Any] = []

    def ask(self, line: Any, frames: list[dict[str, Any]]) -> None:
        self.asked += frames
        if frames:
            threading.Thread(
                target=line.send, args=[[{"id": one["id"], "value": "fine"} for one in frames]]
            ).start()

    def hung_up(self, line: Any) -> None:
        self.left.append(line)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def port(monkeypatch, service) -> Iterator[int]:
    opened = []

    class Server(server.uvicorn.Server):
        def run(self, sockets: Any = None) -> None:
            opened.append(
                (
                    self,
                    threading.current_thread(),
                    sockets[0].getsockname()[1],
                )
            )
            super().run(sockets)

    monkeypatch.setenv(server_access.VARIABLE, KEY)
    monkeypatch.setattr(server.uvicorn, "Server", Server)
    Key.of_environment.cache_clear()
    server.serve_in_thread(server.reserved("127.0.0.1", 0), ENGINE, service)
    wait_for(lambda: opened and opened[0][0].started)
    one, thread, place = opened[0]
    yield place
    one.should_exit = one.force_exit = True
    thread.join(PATIENCE_S)
    Key.of_environment.cache_clear()


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def answered(one: socket.socket, request: bytes) -> bool:
    one.sendall(request)
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        received += one.recv(1000)
    return received.startswith(b"HTTP/1.1 200")


@pytest.mark.fault(
    "hundreds of half-open connections from one address, a header of 64 KiB",
    "128 stay, the long one is cut, the owner is answered",
)
def test_strangers_are_few(port, monkeypatch):
    monkeypatch.setattr(server_access, "UNAUTHENTICATED_S", 2 * PATIENCE_S)
    strangers = half_open(port, 300)
    assert http_status(port, KEY) == 200
    wait_for(lambda: sum(map(is_open, strangers)) <= MAX_OPEN)
    assert is_open(strangers[-1]), "the oldest go first"
    assert not is_open(strangers[0])
    assert http_status(port, KEY) == 200
    assert http_status(port, "wrong") == 401
    with suppress(OSError):
        for _ in range(2):  # a header has a limit
            strangers[-1].sendall(b"a" * (1 << 16))
    wait_for(lambda: not is_open(strangers[-1]))
    for one in strangers:
        one.close()


@pytest.mark.fault("a header that never ends", "the connection is cut after a while")
def test_a_stranger_has_little_time(port, monkeypatch):
    monkeypatch.setattr(server_access, "UNAUTHENTICATED_S", 0.5)
    (stranger,) = half_open(port, 1)
    wait_for(lambda: not is_open(stranger))
    assert http_status(port, KEY) == 200
    stranger.close()


def test_the_owner_s_connection_stays(port, monkeypatch):
    """Longer than a stranger's, and however many strangers come."""
    monkeypatch.setattr(server_access, "UNAUTHENTICATED_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as owner:
        line = (
            b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer "
            + KEY.encode()
            + b"\r\n\r\n"
        )
        assert answered(owner, line)
        strangers = half_open(port, 150)
        wait_for(lambda: not any(map(is_open, strangers)))
        assert answered(owner, line)
        for one in strangers:
            one.close()


def test_no_server_without_a_key(monkeypatch):
    monkeypatch.delenv(server_access.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match=server_access.VARIABLE):
        RequireKey(None)


def converse(
    port: int, use: Callable[[aiohttp.ClientWebSocketResponse], Awaitable[Any]], key: str = KEY
) -> Any:
    async def main() -> Any:
        headers = {"authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.ws_connect(
                f"http://127.0.0.1:{port}/engine", timeout=aiohttp.ClientWSTimeout()
            ) as connection,
            asyncio.timeout(PATIENCE_S),
        ):
            return await use(connection)

    return asyncio.run(main())


async def replies(connection: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    return msgspec.msgpack.decode(await connection.receive_bytes())


def test_a_conversation(port, service):
    frames = [STATUS, STATUS | {"id": 2, "method": "__class__"}]

    async def talk(connection: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
        (name,) = await replies(connection)
        assert (name["id"], len(name["value"])) == (0, 32), "which process this is"
        await connection.send_bytes(encode(frames))
        return sorted(
            [*await replies(connection), *await replies(connection)], key=lambda one: one["id"]
        )

    fine, refused = converse(port, talk)
    assert fine == {"id": 1, "value": "fine"}
    assert (refused["id"], refused["error"]["type"]) == (2, "Refused")
    assert service.asked == [STATUS], "written anew, without what does not fit"
    wait_for(lambda: len(service.left) == 1)


@pytest.mark.fault("a conversation without the key", "it is refused before it begins")
@pytest.mark.parametrize("key", ["", KEY[:-1]])
def test_no_conversation_without_the_key(port, service, key):
    assert http_status(port, key) == 401
    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        converse(port, replies, key)
    assert refused.value.status == 403
    assert service.asked == []


@pytest.mark.fault(
    "a transmission that is no list of requests, or does not end",
    "the connection is ended; others stay",
)
@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\x91" * 100_000, 1008),
        (b"", 1008),
        ("text", 1008),
        (None, 1009),
    ],
)
def test_odd_transmissions_end_a_conversation(port, service, content, code):
    async def use(connection: aiohttp.ClientWebSocketResponse) -> int | None:
        await replies(connection)
        if content is None:  # a masked frame's head alone
            connection._writer.transport.write(
                b"\x82\xff" + struct.pack(">Q", LONGEST_TRANSMISSION + 1) + b"mask"
            )
        else:
            await (connection.send_str if isinstance(content, str) else connection.send_bytes)(
                content
            )
        while (await connection.receive()).type not in (
            aiohttp.WSMsgType.CLOSE,
            aiohttp.WSMsgType.CLOSED,
        ):
            pass
        return connection.close_code

    assert converse(port, use) == code
    wait_for(lambda: len(service.left) == 1)
    assert service.asked == []
    assert http_status(port, KEY) == 200


@pytest.mark.fault(
    "another process takes a server's port before it listens", "the server ends, and says so"
)
def test_a_door_that_cannot_be_opened_is_an_error(monkeypatch, service):
    monkeypatch.setenv(server_access.VARIABLE, KEY)
    with server.reserved("127.0.0.1", 0) as place, server.reserved(*place.getsockname()) as other:
        other.listen()
        with pytest.raises(OSError, match="in use"):
            server.serve_in_thread(place, ENGINE, service)


OTHERS = [
    ("GET", "/"),
    ("POST", "/collective_rpc"),
    ("POST", "/v1/completions"),
    ("POST", "/engine"),
    ("PUT", "/health"),
]


@pytest.mark.fault("any other route, with the key", "404: a server answers what a sampler asks")
def test_other_routes_do_not_exist(port, service):
    assert [one for one in OTHERS if http_status(port, KEY, one[1], one[0]) != 404] == []
    assert service.asked == []
