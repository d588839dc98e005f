"""Health of an engine, for GET /health of its server: it answers, works (CPU time, context switches), or hangs.

One that does not answer at once may be busy with a long prefill, an update or a compilation; then its processes use the
CPU, or their main threads look again and again for what they wait for (a lock on a cache, a worker, a page of a file).
One that neither answers nor works hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from megatron_rl.processes.process import work_below

WAIT_S = 4.0
BUSY_SHARE = 0.05  # of a core; an engine that waits for a request uses a hundredth
BUSY_TURNS = 5.0  # of main threads, per second; they have none while they wait for a request


class Heartbeat:
    def __init__(self, ask: Callable[[], Awaitable[Any]], pid: int) -> None:
        """`ask`: something that the engine answers at once. `pid`: its process, whose children are its workers."""
        self._ask, self._pid = ask, pid
        self._asked: asyncio.Future[Any] | None = None  # one question at a time, however often somebody looks

    async def look(self) -> tuple[int, dict[str, str]]:
        """A status of HTTP, and what is known."""
        before = work_below(self._pid, itself=True)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._ask())
        await asyncio.wait([self._asked], timeout=WAIT_S)
        if self._asked.done():
            error = self._asked.exception()
            return (200, {"engine": "answers"}) if error is None else (503, {"error": f"its engine failed: {error}"})
        after = work_below(self._pid, itself=True)
        if after.stopped:
            return 503, {"error": f"its engine's process {after.stopped[0]} is stopped"}
        if after.cpu_s - before.cpu_s >= BUSY_SHARE * WAIT_S or after.turns - before.turns >= BUSY_TURNS * WAIT_S:
            return 200, {"engine": "busy"}
        return 503, {"error": f"its engine neither answers nor works (for {WAIT_S:g} s)"}
