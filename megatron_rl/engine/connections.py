"""Who may hold a connection to a server of the fleet: whoever has shown the key, and few others for a short time.

Uvicorn waits for ever for a request's header. A thousand connections that never send one would use up the process's
files, and shut out those who hold the key.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from megatron_rl.engine.server_key import Key

STRANGER_S = 10.0  # from a connection to the key
STRANGERS = 128  # at once; beyond that, the oldest one of the address that has most of them goes
HEADER_BYTES = 64 << 10

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
