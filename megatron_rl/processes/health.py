"""Health of an engine: it replies, is busy, has failed, or one of its processes is stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_rl.processes.process import stopped_below

ANSWER_S = 4.0  # of an idle engine


class EngineHealth:
    """Health check of an engine. Without an immediate reply it may be busy with a long prefill, an
    update or a compilation: hangs are detected by sampler.request_timeout_s.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]], pid: int) -> None:
        """`ask`: a request that the engine replies to at once. `pid`: its process, whose children
        are its workers.
        """
        self._ask = ask
        self._pid = pid
        # one check at a time, for any number of clients
        self._asked: asyncio.Future[Any] | None = None

    async def look(self) -> tuple[int, dict[str, str]]:
        """Return the HTTP status and the details."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(lambda one: one.cancelled() or one.exception())
        await asyncio.wait([self._asked], timeout=ANSWER_S)
        if not self._asked.done():
            if stopped := stopped_below(self._pid):
                return 503, {"error": f"its engine's process {stopped[0]} is stopped"}
            return 200, {"engine": "busy"}
        if error := self._asked.exception():
            return 503, {"error": f"its engine failed: {error}"}
        return 200, {"engine": "answers"}
