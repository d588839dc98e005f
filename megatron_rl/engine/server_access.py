"""Access control of an engine's server: middleware that requires the key, and timeouts of
unauthenticated connections.

An ASGI middleware requires the key before anything else: a client of the engine can replace its
weights. The key comes from the environment, which other users of the machine cannot read.

Uvicorn waits indefinitely for a request's header: connections without the key are limited
(processes/unauthenticated.py).
"""

import asyncio
import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_rl.processes.unauthenticated import UNAUTHENTICATED_S, UnauthenticatedConnections

VARIABLE = "VLLM_API_KEY"
HEADER_BYTES = 64 << 10

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Key:
    def __init__(self, key: str) -> None:
        self._digest = _digest(b"Bearer " + key.encode())

    @staticmethod
    @cache
    def of_environment() -> "Key":
        return Key(os.environ[VARIABLE])

    def shown_in(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        # digests have one length: the comparison leaks nothing about the key
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._digest)


class RequireKey:
    def __init__(self, app: App) -> None:
        key = os.environ.get(VARIABLE, "")
        if not key:
            raise RuntimeError(
                f"{VARIABLE} is not set: a server of the fleet does not start without a key"
            )
        self._app = app
        self._key = Key(key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._key.shown_in(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send(
                {"type": "http.response.body", "body": b'{"error": "this server needs its key"}'}
            )
        else:
            await send({"type": "websocket.close", "code": 1008})


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_unauthenticated = UnauthenticatedConnections()


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # bytes so far; None between a header and the end of its request
        self._header_bytes: int | None = 0
        _unauthenticated.add(transport, UNAUTHENTICATED_S)

    def connection_lost(self, exc: Exception | None) -> None:
        _unauthenticated.forget(self.transport)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._header_bytes or 0) > HEADER_BYTES:
            _unauthenticated.cut(self.transport)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_bytes or 0

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        if Key.of_environment().shown_in(self.headers):
            _unauthenticated.forget(self.transport)
        super().on_headers_complete()
