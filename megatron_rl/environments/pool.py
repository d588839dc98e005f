"""Pool of environment processes: forks them, lends one to each conversation, kills unresponsive
ones; preflight's trial of a class.

In the driver, or chat, from one event loop, except `start` and `close`. A process that misses its
deadline, dies or sends a malformed reply is killed with all its descendants; the next conversation
gets a new one.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import EnvironmentSection
from megatron_rl.environments.environment import as_messages
from megatron_rl.processes import heartbeat
from megatron_rl.processes.channel import LENGTH, Channel
from megatron_rl.processes.environment import for_rewards
from megatron_rl.processes.process import end_with_descendants
from megatron_rl.rewards.user_process import RewardLog, as_json, first_reply, user_process
from megatron_rl.types import LARGEST_NUMBER

FORK_SERVER = "environment fork_server"
FORK_TIMEOUT_S = 20.0  # for a fork server that is running
REAP_S = 0.5
GRACE_S = 5.0  # beyond a call's own limit, which the process itself enforces if it can
LARGEST_REPLY = 16 << 20
# fork servers that may die in a row during a request for a process, or under one conversation
FORK_SERVERS = 3


class EnvironmentFailed(RuntimeError):
    """The environment raised, timed out or died: this conversation cannot continue."""


class ForkServerLost(EnvironmentFailed):
    """The fork server died, and its children with it: not counted as a failure of a
    conversation.
    """


class _About(msgspec.Struct):
    agent: bool = False
    tools: list[dict[str, Any]] = []


class _EnvironmentReply(msgspec.Struct):
    id: int
    value: Any = None
    error: str | None = None


Number = Annotated[float, msgspec.Meta(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)] | None
Objects = list[dict[str, Any]]
Numbers = dict[str, Number]
VALUES: dict[str, dict[str, Any]] = {  # of replies, by request
    "reset": {"messages": Objects, "tools": Objects},
    "step": {
        "messages": Objects,
        "reward": Number,
        "advantage": Number,
        "done": bool,
        "numbers": Numbers,
    },
    "tool": {"text": str, "failed": bool},
    "run": {"reward": Number, "numbers": Numbers},
    "close": {"reward": Number},
}


def check_value(value: Any, request: str) -> None:
    """Raise if a reply's value has not the type that the request returns."""
    for name, form in VALUES[request].items():
        msgspec.convert(value[name], form)
    json.dumps(value)  # messages are recorded as JSON
    if "messages" in value:
        as_messages(value["messages"])


class EnvironmentProcess:
    """Forked process, which runs one environment at a time."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        pid: int,
        fork_server: subprocess.Popen[bytes],
    ) -> None:
        """`fork_server`: the fork server of this process, which outlives it."""
        self.pid = pid
        self.fork_server = fork_server
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._killed = False

    @property
    def alive(self) -> bool:
        return not self._killed and not self._reader.at_eof()

    async def ask(self, what: dict[str, Any], seconds: float) -> Any:
        """Return the reply to a request; kill the process if there is none in time."""
        number = next(self._numbers)
        frame = msgspec.msgpack.encode(
            {"id": number, "seconds": seconds, "what": as_json(what).decode()}
        )
        try:
            self._writer.write(LENGTH.pack(len(frame)) + frame)
            async with asyncio.timeout(seconds + GRACE_S):
                await self._writer.drain()
                reply = msgspec.convert(await receive(self._reader), _EnvironmentReply)
            if reply.id != number:
                raise msgspec.DecodeError("concurrent request")
            if reply.error is None:
                check_value(reply.value, what["do"])
        except TimeoutError:
            self.kill()
            raise EnvironmentFailed(
                f"no reply within {seconds:g} s: its process was killed"
            ) from None
        except (OSError, asyncio.IncompleteReadError):
            self.kill()
            if await ends_soon(self.fork_server):
                raise ForkServerLost("its process died") from None
            raise EnvironmentFailed("its process died") from None
        except (msgspec.DecodeError, ValueError, TypeError, LookupError, RecursionError) as error:
            self.kill()
            raise EnvironmentFailed(
                f"its process sent a malformed reply ({str(error)[:100]})"
            ) from None
        except BaseException:
            self.kill()  # cancelled in the middle: the next reply would belong to this request
            raise
        heartbeat.mark()
        if reply.error is not None:
            raise EnvironmentFailed(reply.error)
        return reply.value

    def kill(self) -> None:
        self._killed = True
        self._writer.close()
        end_with_descendants(self.pid)


async def ends_soon(fork_server: subprocess.Popen[bytes]) -> bool:
    """Return True if a fork server has ended: its children may be seen to end before it does."""
    deadline = time.monotonic() + REAP_S
    while fork_server.poll() is None and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    return fork_server.poll() is not None


async def receive(reader: asyncio.StreamReader) -> Any:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > LARGEST_REPLY:
        raise msgspec.DecodeError(f"a message of {length} bytes, at most {LARGEST_REPLY}")
    return msgspec.msgpack.decode(await reader.readexactly(length))


class EnvironmentPool:
    """Pool of one process per open conversation; `environment.max_concurrent` is the limit."""

    def __init__(self, config: EnvironmentSection, variables: Sequence[str] = ()) -> None:
        """`variables`: environment variables that the processes get besides the usual ones."""
        self._config = config
        self._variables = variables
        self._log = RewardLog()
        self.about = _About()
        self._fork_server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[EnvironmentProcess] = []
        self._connections = weakref.WeakSet[asyncio.StreamWriter]()
        self._loop: asyncio.AbstractEventLoop  # of the connections
        self._starting = threading.Lock()
        self.closed = False

    def start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Return the running fork server and its socket, starting it if needed; an error names the
        key.
        """
        with self._starting:
            fork_server = self._fork_server
            control = self._control
            if fork_server is not None and control is not None and fork_server.poll() is None:
                return fork_server, control
            self._end_fork_server(fork_server)
            if self.closed:
                raise EnvironmentFailed("the environments are closed")
            variables = for_rewards(os.environ, self._variables)
            fork_server, control = user_process(
                "megatron_rl.environments.worker", FORK_SERVER, self._log, variables
            )
            self._fork_server = fork_server
            self._control = control
            start = {"name": self._config.name, "settings": self._config.settings}
            try:
                reply = first_reply(
                    Channel(control), start, LARGEST_REPLY, "environment.name", self._config.name
                )
            except ConfigError:
                self._end_fork_server(fork_server)
                raise
            self.about = msgspec.convert(reply, _About)
            control.settimeout(GRACE_S)
            return fork_server, control

    async def take(self) -> EnvironmentProcess:
        """Return a process without an open environment."""
        while self._idle:
            process = self._idle.pop()
            # without its fork server the process is about to end, too
            if process.alive and process.fork_server.poll() is None:
                return process
        for _ in range(FORK_SERVERS - 1):
            with suppress(ForkServerLost):
                return await self._forked()
        return await self._forked()

    async def _forked(self) -> EnvironmentProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            fork_server, control = await asyncio.to_thread(self.start)
            try:
                socket.send_fds(control, [b"+"], [theirs.fileno()])
            except OSError as error:
                ours.close()
                self._end_fork_server(fork_server)
                raise ForkServerLost(f"no process could be forked ({error})") from None
        reader, writer = await asyncio.open_connection(sock=ours, limit=LARGEST_REPLY)
        self._loop = asyncio.get_running_loop()
        self._connections.add(writer)
        try:
            async with asyncio.timeout(FORK_TIMEOUT_S):
                pid = int((await receive(reader))["pid"])
        except (TimeoutError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError) as error:
            writer.close()
            self._end_fork_server(fork_server)  # it is unresponsive, or cannot fork any more
            raise ForkServerLost(f"no process was forked ({type(error).__name__})") from None
        except asyncio.CancelledError:
            writer.close()
            raise
        return EnvironmentProcess(reader, writer, pid, fork_server)

    def give_back(self, process: EnvironmentProcess) -> None:
        if process.alive and not self.closed:
            self._idle.append(process)

    def close(self) -> None:
        self.closed = True
        self._end_fork_server(self._fork_server)
        # a connection that is still open at interpreter exit can block it forever
        for connection in list(self._connections):
            with suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(connection.close)
        self._log.close()

    def _end_fork_server(self, fork_server: subprocess.Popen[bytes] | None) -> None:
        """End the fork server and its children; pending calls see the end of their stream."""
        if fork_server is not self._fork_server:
            return  # it has been replaced
        self._fork_server = None
        control = self._control
        self._control = None
        if fork_server is not None:
            end_with_descendants(fork_server.pid)
            fork_server.wait()
        self._idle.clear()
        if control is not None:
            control.close()


def check_importable(config: EnvironmentSection, variables: Sequence[str]) -> _About:
    """Raise the errors of `start`; return a description of the class or agent."""
    pool = EnvironmentPool(config, variables)
    try:
        pool.start()
        return pool.about
    finally:
        pool.close()
