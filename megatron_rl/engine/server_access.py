"""Access control of an engine's server: middleware that asks for the key, connections that cut off strangers in time.

An ASGI middleware asks for the key before anything else: whoever reaches the engine can move its weights. The key comes
from the environment, which other users of the machine cannot read.

Uvicorn waits for ever for a request's header. A thousand connections that never send one would use up the process's
files, and shut out those who hold the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

VARIABLE = "VLLM_API_KEY"
STRANGER_S = 10.0  # from a connection to the key
STRANGERS = 128  # at once; beyond that, the oldest one of the address that has most of them goes
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
    def of_environment() -> Key:
        return Key(os.environ[VARIABLE])

    def shown_in(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        # digests have one length: the comparison says nothing about the key
        return len(given) == 1 and hmac.compare_digest(_digest(given[0]), self._digest)


class RequireKey:
    def __init__(self, app: App) -> None:
        key = os.environ.get(VARIABLE, "")
        if not key:
            raise RuntimeError(f"{VARIABLE} is not set: a server of the fleet does not start without a key")
        self._app = app
        self._key = Key(key)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._key.shown_in(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"error": "this server needs its key"}'})
        else:
            await send({"type": "websocket.close", "code": 1008})


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_strangers: dict[Connection, None] = {}  # connections without a key so far, oldest first


class Connection(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._header_bytes: int | None = 0  # so far; None between a header and the end of its request
        self._limit = self.loop.call_later(STRANGER_S, self._cut)
        _strangers[self] = None
        if len(_strangers) > STRANGERS:
            ((crowded, _),) = Counter(one._address for one in _strangers).most_common(1)
            next(one for one in _strangers if one._address == crowded)._cut()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._header_bytes is not None:
            self._header_bytes += len(data)
        super().data_received(data)
        if (self._header_bytes or 0) > HEADER_BYTES:
            self._cut()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = self._header_bytes or 0

    def on_headers_complete(self) -> None:
        self._header_bytes = None
        if self in _strangers and Key.of_environment().shown_in(self.headers):
            self._forget()
        super().on_headers_complete()

    @property
    def _address(self) -> str:
        return self.client[0] if self.client else ""

    def _forget(self) -> None:
        _strangers.pop(self, None)
        self._limit.cancel()

    def _cut(self) -> None:
        self._forget()
        if self.transport is not None:
            self.transport.abort()
