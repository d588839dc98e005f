"""Health of an engine: it answers, is busy, has failed, or one of its processes is stopped."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_rl.processes.process import stopped_below

ANSWER_S = 4.0  # of an engine that is not busy


class EngineHealth:
    """One that does not answer at once may be busy with a long prefill, an update or a compilation:
    what hangs is found by sampler.request_timeout_s.
    """

    def __init__(self, ask: Callable[[], Awaitable[Any]], pid: int) -> None:
        """`ask`: something that the engine answers at once. `pid`: its process, whose children are
        its workers.
        """
        self._ask = ask
        self._pid = pid
        # one question at a time, however many look
        self._asked: asyncio.Future[Any] | None = None

    async def look(self) -> tuple[int, dict[str, str]]:
        """A status of HTTP, and what is known."""
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
