"""HTTP and WebSocket server of an engine: `python -m megatron_rl.engine.server FD PARENT_PID CORES
HOST PORT`.

The process is a child's (child.py) plus a thread in which uvicorn serves. A WebSocket at /engine
carries the same messages as a child's socket, validated (messages.py), behind a key, with a limit
on unauthenticated connections (server_access.py). GET /health reports whether the engine replies,
is busy, or is stopped. There are no other endpoints.
"""

import asyncio
import os
import socket
import sys
import threading
import uuid
from typing import Any

import msgspec
import uvicorn

from megatron_rl.engine.child import run
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.messages import LONGEST_TRANSMISSION, checked, transmissions
from megatron_rl.engine.server_access import Connection, Message, Receive, RequireKey, Send
from megatron_rl.engine.service import Frame, Service
from megatron_rl.processes.channel import Refused
from megatron_rl.processes.health import EngineHealth

PING_S = 20.0  # of an idle connection


class ClientConnection:
    """Connection of a client: its requests, and pending replies."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, frames: list[Frame]) -> None:
        for content in transmissions(frames):
            self._loop.call_soon_threadsafe(self._waiting.put_nowait, content)

    async def deliver(self) -> None:
        while True:
            await self._send({"type": "websocket.send", "bytes": await self._waiting.get()})


class EngineApp:
    """ASGI application of a server."""

    def __init__(self, engine: Engine, service: Service) -> None:
        self._service = service
        self._health = EngineHealth(self._ask_status, os.getpid())
        self._bounds = engine.vocabulary, engine.longest, engine.transport
        self._instance = uuid.uuid4().hex

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and scope["path"] == "/engine":
            await self._converse(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        elif (scope["method"], scope["path"]) == ("GET", "/health"):
            await _answer(send, *await self._health.look())
        else:
            await _answer(
                send,
                404,
                {"error": f"an engine has no request {scope['method']} {scope['path']:.100}"},
            )

    async def _converse(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        caller = ClientConnection(send)
        caller.send([{"id": 0, "value": self._instance}])
        delivering = asyncio.ensure_future(caller.deliver())
        try:
            while (message := await receive())["type"] == "websocket.receive":
                requests, refusals = checked(message.get("bytes") or b"", *self._bounds)
                if refusals:
                    caller.send(refusals)
                self._service.ask(caller, requests)
        except Refused as error:
            # a close frame has room for 123 bytes
            reason = str(error).encode()[:120].decode(errors="ignore")
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        finally:
            delivering.cancel()
            self._service.hung_up(caller)

    async def _ask_status(self) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        class Asking:
            def send(self, frames: list[Frame]) -> None:
                loop.call_soon_threadsafe(answer.set_result, frames)

        self._service.ask(Asking(), [{"id": 1, "method": "status", "arguments": {}}])
        ((reply),) = await answer
        if "error" in reply:
            raise RuntimeError(reply["error"]["message"])


async def _answer(send: Send, status: int, content: dict[str, str]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": msgspec.json.encode(content)})


def reserved(host: str, port: int) -> socket.socket:
    """Bind the port while the engine starts, so that no other process takes it: it may be in the
    range of ephemeral ports.
    """
    place = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind((host, port))
    return place


def serve_in_thread(place: socket.socket, engine: Engine, service: Service) -> None:
    """Listen, and serve in a thread from now on."""
    settings: dict[str, Any] = {
        "http": Connection,
        "ws": "websockets-sansio",
        "ws_max_size": LONGEST_TRANSMISSION,
        "ws_ping_interval": PING_S,
        "ws_ping_timeout": None,  # the sampler detects hangs of an engine
        "lifespan": "off",
        "log_level": "warning",
        "access_log": False,
        "timeout_keep_alive": 3600,
    }
    server = uvicorn.Server(uvicorn.Config(RequireKey(EngineApp(engine, service)), **settings))
    place.listen()  # uvloop does not report a failure to listen
    threading.Thread(
        target=server.run,
        args=[[place]],
        name="door",
        daemon=True,
    ).start()


def main() -> None:
    descriptor, parent, cores, host, port = sys.argv[1:6]
    place = reserved(host, int(port))
    run(int(descriptor), int(parent), cores, lambda *opened: serve_in_thread(place, *opened))


if __name__ == "__main__":
    main()
