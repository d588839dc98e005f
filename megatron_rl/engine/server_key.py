"""The key of a fleet's server, asked for on every route: an ASGI middleware for vLLM's `--middleware`.

vLLM's own check covers /v1 and /inference only. Every other route answers anyone who reaches the port, also those that
move weights, pause the engine or call its workers (/collective_rpc, /update_weight_version, /pause, ...). With this
middleware none does. The key comes from the environment, where vLLM's own check finds it too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import cache
from typing import Any

VARIABLE = "VLLM_API_KEY"

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
