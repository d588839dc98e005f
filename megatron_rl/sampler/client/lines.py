"""Connections to an engine process: a child's socket, or a server's port (/health, and a WebSocket
that is reopened if lost).
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import msgspec

from megatron_rl.engine.messages import LONGEST_TRANSMISSION
from megatron_rl.processes.channel import LENGTH
from megatron_rl.sampler.client.interface import EngineTimeout, EngineUnavailable, Look, read_health

HEALTH_TIMEOUT_S = 10.0
ENDED = "its process ended"
OPEN_S = 10.0  # to open a connection
LONGEST_ERROR = 600  # characters of a server's error: it may quote the request


class Line(ABC):
    """Transport of transmissions. Calls `received` with each one, and `ended` once, with the
    reason.

    `reopened`: requests without a reply have to be sent again.
    """

    # oversized samples are refused on the way: a failed one means that the engine has broken down
    checked = False

    def __init__(self) -> None:
        self.reopened: Callable[[], None] = lambda: None
        self.received: Callable[[bytes], None] = lambda content: None
        self.ended: Callable[[str], None] = lambda reason: None

    @abstractmethod
    async def open(self) -> None:
        """Connect, unless connected."""

    @abstractmethod
    def send(self, content: bytes) -> None: ...

    async def look(self) -> Look:
        """Check the engine's health, if the line has a way of its own."""
        return Look(True)

    @abstractmethod
    async def close(self) -> None: ...


class SocketLine(Line):
    """Socket of a child."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket = connection
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._socket)
            self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self.received(await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            self.ended(ENDED)

    def send(self, content: bytes) -> None:
        assert self._writer is not None
        self._writer.write(LENGTH.pack(len(content)) + content)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()


class PortLine(Line):
    """WebSocket to a server, under its key. A lost connection does not mean a lost server: it is
    reopened once.
    """

    checked = True

    def __init__(self, address: str, key: str) -> None:
        super().__init__()
        self._address = address
        self._key = key
        self._session: aiohttp.ClientSession | None = None
        self._connection: aiohttp.ClientWebSocketResponse | None = None
        self._reading: asyncio.Task[None] | None = None
        self._sending = asyncio.Queue[bytes]()
        self._instance = b""  # of the server's process: a new one does not know the open requests

    async def open(self) -> None:
        if self._reading is None or self._reading.done():
            await self._connect()
            self._reading = asyncio.create_task(self._keep())

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                # no transmission of a server may decompress to more than this
                self._connection = await self._http().ws_connect(
                    f"{self._address}/engine", max_msg_size=LONGEST_TRANSMISSION, compress=0
                )
                instance = await self._connection.receive_bytes()
        except TimeoutError:
            raise EngineTimeout(f"{self._address} did not reply within {OPEN_S:g} s") from None
        except (aiohttp.ClientError, OSError, TypeError) as error:
            raise EngineUnavailable(
                f"{self._address}: {type(error).__name__}: {str(error)[:LONGEST_ERROR]}"
            ) from None
        if self._instance not in (b"", instance):
            raise EngineUnavailable("another server has taken its place")
        self._instance = instance

    async def _keep(self) -> None:
        """Read until the connection is lost twice without a transmission in between."""
        lost = 0
        while True:
            assert self._connection is not None
            writing = asyncio.create_task(self._write(self._connection))
            try:
                async for message in self._connection:
                    if message.type is aiohttp.WSMsgType.BINARY:
                        lost = 0
                        self.received(message.data)
            except Exception as error:  # any exception: the server's data is untrusted
                return self.ended(f"{type(error).__name__}: {str(error)[:LONGEST_ERROR]}")
            finally:
                writing.cancel()
            lost += 1
            reason = _closing(self._connection) or (
                "its connection was lost twice" if lost == 2 else ""
            )
            if reason:
                return self.ended(reason)
            try:
                await self._connect()
            except EngineUnavailable as error:
                return self.ended(str(error))
            self._sending = asyncio.Queue()  # open requests are sent again
            self.reopened()

    async def _write(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            content = await self._sending.get()
            with suppress(ConnectionError):  # the reader reports it
                await connection.send_bytes(content)

    def send(self, content: bytes) -> None:
        self._sending.put_nowait(content)

    async def look(self) -> Look:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            async with self._http().get(f"{self._address}/health", timeout=timeout) as response:
                content = await response.content.read(1 << 16)
                status = response.status
            said = msgspec.json.decode(content, type=dict[str, str])
        except TimeoutError:
            raise EngineTimeout(f"did not reply to /health within {HEALTH_TIMEOUT_S:g} s") from None
        except (
            aiohttp.ClientError,
            OSError,
            msgspec.DecodeError,
            UnicodeError,
            RecursionError,
        ) as error:
            return Look(False, f"/health: {type(error).__name__}: {str(error)[:200]}")
        return read_health(status, said)

    async def answers_without_key(self) -> bool:
        async with (
            aiohttp.ClientSession() as session,
            session.get(
                f"{self._address}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
            ) as response,
        ):
            return response.status < 400

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
            # no proxies of the environment; a compressed body has no bound
            headers["accept-encoding"] = "identity"
            self._session = aiohttp.ClientSession(headers=headers, auto_decompress=False)
        return self._session


def _closing(connection: aiohttp.ClientWebSocketResponse) -> str:
    """Return the peer's reason for closing; empty if it has only stopped."""
    error = connection.exception()
    if error is not None and not isinstance(error, (aiohttp.ClientError, ConnectionError)):
        return f"{type(error).__name__}: {str(error)[:LONGEST_ERROR]}"
    if connection.close_code in (None, 1000, 1001, 1006, 1012):
        return ""
    return f"it closed the connection ({connection.close_code})"
