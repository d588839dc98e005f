"""Service loop of an engine process: receives requests from its socket or connections, steps vLLM,
sends the replies.

Requests are started between two of the engine's steps; the finished samples of a step are sent to
each client in one transmission. A line is the origin of a request: a child's socket, or one
connection of a server.
"""

import os
import queue
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from megatron_rl.engine.engine import Engine

Frame = dict[str, Any]


class Line(Protocol):
    def send(self, frames: list[Frame]) -> None:
        """Send replies. Called in the engine's thread."""
        ...


class Service:
    """Pending requests of an engine process, and the lines that wait for replies."""

    def __init__(self) -> None:
        self._arrived: queue.SimpleQueue[tuple[Line, Sequence[Frame]]] = queue.SimpleQueue()
        # by the engine's number: the line, and the line's own number
        self._open: dict[int, tuple[Line, int]] = {}
        self._count = 0
        # by the line's identity, not yet sent
        self._replies: dict[int, tuple[Line, list[Frame]]] = {}

    def ask(self, line: Line, frames: Sequence[Frame]) -> None:
        """Add requests of a line. Called from any thread."""
        self._arrived.put((line, frames))

    def hung_up(self, line: Line) -> None:
        """Cancel the requests of a closed line. Called from any thread."""
        self._arrived.put((line, [{"id": -1, "method": "hung_up", "arguments": {}}]))

    def run(self, engine: Engine) -> None:
        """Run until the process ends, or one of the engine's workers has; open requests are then
        dropped.
        """
        waiting: list[tuple[Line, Frame]] = []
        while True:
            waiting += self._next(wait=not waiting and not engine.samples.writes)
            now = waiting
            waiting = []
            for line, request in now:
                if engine.must_wait(request["method"]):
                    waiting.append((line, request))
                else:
                    self._take(engine, line, request)
                if engine.broken:
                    return
            finished = engine.samples.step()
            if engine.broken:
                return
            for number, reply in finished:
                if number in self._open:
                    line, theirs = self._open.pop(number)
                    self._reply(line, theirs, reply)
            replies = self._replies
            self._replies = {}
            for line, frames in replies.values():
                line.send(frames)

    def _next(self, wait: bool) -> list[tuple[Line, Frame]]:
        found = [self._arrived.get()] if wait else []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return [(line, frame) for line, frames in found for frame in frames]

    def _take(self, engine: Engine, line: Line, request: Frame) -> None:
        number = request["id"]
        method = request["method"]
        arguments = request["arguments"]
        try:
            if method == "generate":
                self._count += 1
                self._open[self._count] = line, number
                engine.samples.begin(self._count, **arguments)
            elif method in ("cancel", "hung_up"):
                wanted = arguments.get("requests")
                if wanted is not None:
                    wanted = set(wanted)
                self._cancel(engine, line, wanted)
                if method == "cancel":
                    self._reply(line, number, None)
            elif method == "shutdown":
                engine.shutdown()
                os._exit(0)
            else:
                self._reply(line, number, getattr(engine, method)(**arguments))
        except Exception as error:
            traceback.print_exc()
            if method == "generate":
                del self._open[self._count]
            self._reply(line, number, error)

    def _cancel(self, engine: Engine, line: Line, wanted: set[int] | None) -> None:
        """Cancel requests of a line. `wanted`: by the line's own numbers; None: all."""
        cancelled = [
            number
            for number, (of, theirs) in self._open.items()
            if of is line and (wanted is None or theirs in wanted)
        ]
        engine.samples.cancel(cancelled)
        for number in cancelled:
            del self._open[number]

    def _reply(self, line: Line, number: int, value: Any) -> None:
        _, frames = self._replies.setdefault(id(line), (line, []))
        frames.append(
            {"id": number, "error": described(value)}
            if isinstance(value, Exception)
            else {"id": number, "value": value}
        )


def described(error: Exception) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}
