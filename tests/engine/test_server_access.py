"""A real uvicorn with our connections: the key, and strangers who never finish a request."""

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import uvicorn

from megatron_rl.engine import server_access
from megatron_rl.engine.server_access import Key, RequireKey

KEY = "k" * 32
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-A: "
PATIENCE_S = 60


@pytest.fixture
def port(monkeypatch) -> Iterator[int]:
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    monkeypatch.setenv(server_access.VARIABLE, KEY)
    Key.of_environment.cache_clear()
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as place:
        config = uvicorn.Config(RequireKey(app), http=server_access.Connection, lifespan="off", log_level="error")
        server = uvicorn.Server(config)
        loop = threading.Thread(target=lambda: asyncio.run(server.serve([place])), daemon=True)
        loop.start()
        yield place.getsockname()[1]
        server.should_exit = True
        loop.join(PATIENCE_S)
    Key.of_environment.cache_clear()


def half_open(port: int, count: int) -> list[socket.socket]:
    found = []
    for _ in range(count):
        one = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
        try:
            one.sendall(HALF)
        except OSError:
            pass  # another one has taken its place already
        found.append(one)
    return found


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def cut_off(one: socket.socket, content: bytes) -> bool:
    try:
        one.sendall(content)
    except OSError:
        return True
    return False


def ask(port: int, key: str = KEY) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/health", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def until(happened) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def answered(one: socket.socket, request: bytes) -> bool:
    one.sendall(request)
    received = b""
    while not received.endswith(b"ok"):
        received += one.recv(1000)
    return received.startswith(b"HTTP/1.1 200")


@pytest.mark.fault("hundreds of half-open connections from one address", "128 stay, the owner is answered")
def test_strangers_are_few(port, monkeypatch):
    monkeypatch.setattr(server_access, "STRANGER_S", 2 * PATIENCE_S)
    strangers = half_open(port, 300)
    assert ask(port) == 200
    until(lambda: sum(map(is_open, strangers)) <= server_access.STRANGERS)
    assert is_open(strangers[-1]), "the oldest go first"
    assert not is_open(strangers[0])
    assert ask(port) == 200
    assert ask(port, "wrong") == 401
    for one in strangers:
        one.close()


@pytest.mark.fault("a header that never ends", "the connection is cut after a while")
def test_a_stranger_has_little_time(port, monkeypatch):
    monkeypatch.setattr(server_access, "STRANGER_S", 0.5)
    (stranger,) = half_open(port, 1)
    until(lambda: not is_open(stranger))
    assert ask(port) == 200
    stranger.close()


@pytest.mark.fault("a header of megabytes", "the connection is cut at 64 KiB")
def test_a_header_has_a_limit(port, monkeypatch):
    monkeypatch.setattr(server_access, "STRANGER_S", 2 * PATIENCE_S)
    (stranger,) = half_open(port, 1)
    until(lambda: cut_off(stranger, b"a" * (1 << 16)))
    assert ask(port) == 200
    stranger.close()


def test_the_owner_s_connection_stays(port, monkeypatch):
    """Longer than a stranger's, and however many strangers come."""
    monkeypatch.setattr(server_access, "STRANGER_S", 0.5)
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as owner:
        line = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + KEY.encode() + b"\r\n\r\n"
        assert answered(owner, line)
        strangers = half_open(port, 150)
        until(lambda: not any(map(is_open, strangers)))
        assert answered(owner, line)
        for one in strangers:
            one.close()


def pass_through(app, headers=(), kind="http") -> list[dict]:
    sent: list[dict] = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.disconnect"}

    scope = {"type": kind, "path": "/collective_rpc", "method": "OPTIONS", "headers": list(headers)}
    asyncio.run(app(scope, receive, send))
    return sent


@pytest.fixture
def guarded(monkeypatch) -> RequireKey:
    async def app(scope, receive, send):
        await send({"type": "reached"})

    monkeypatch.setenv(server_access.VARIABLE, KEY)
    return RequireKey(app)


@pytest.mark.fault("requests to a server without its key, or with a part of it", "401, and its application never runs")
def test_only_the_key_gets_through(guarded):
    assert pass_through(guarded, [(b"Authorization", b"Bearer " + KEY.encode())]) == [{"type": "reached"}]
    for headers in (
        [],
        [(b"authorization", KEY.encode())],
        [(b"authorization", b"Bearer " + KEY[:-1].encode())],
        [(b"authorization", b"Bearer wrong"), (b"authorization", b"Bearer " + KEY.encode())],
    ):
        start, body = pass_through(guarded, headers)
        assert start["status"] == 401
        assert KEY.encode() not in body["body"]
        assert json.loads(body["body"])
    assert pass_through(guarded, kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert pass_through(guarded, kind="lifespan") == [{"type": "reached"}]


def test_no_server_without_a_key(monkeypatch):
    monkeypatch.delenv(server_access.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="does not start without a key"):
        RequireKey(None)
