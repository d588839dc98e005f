"""Whether a server's engine still works: what the server's /health answers.

vLLM's own /health says that the engine's process exists. One that was stopped, or whose threads have died, exists as
well. Here the engine itself is asked. One that does not answer at once may be busy with a long prefill, an update
or a compilation; then its processes use the CPU, or their main threads look again and again for what they wait for
(a lock on a cache, a worker, a page of a file). One that neither answers nor works hangs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_rl.processes.process import work_below

WAIT_S = 4.0
BUSY_SHARE = 0.05  # of a core; an engine that waits for a request uses a hundredth
BUSY_TURNS = 5.0  # of its main thread, per second; it has none while it waits for a request

Answer = tuple[int, dict[str, str]]


class Heartbeat:
    def __init__(self, engine: Any, server: int) -> None:
        """`server`: the process whose children are the engine."""
        self._engine, self._server = engine, server
        self._asked: asyncio.Future[Any] | None = None  # one question at a time, however often somebody looks

    async def look(self) -> Answer:
        before = work_below(self._server)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._engine.collective_rpc("weight_update_building"))
        await asyncio.wait([self._asked], timeout=WAIT_S)
        if self._asked.done():
            error = self._asked.exception()
            return (200, {"engine": "answers"}) if error is None else (503, {"error": f"its engine failed: {error}"})
        after = work_below(self._server)
        if after.stopped:
            return 503, {"error": f"its engine's process {after.stopped[0]} is stopped"}
        if after.cpu_s - before.cpu_s >= BUSY_SHARE * WAIT_S or after.turns - before.turns >= BUSY_TURNS * WAIT_S:
            return 200, {"engine": "busy"}
        return 503, {"error": f"its engine neither answers nor works (for {WAIT_S:g} s)"}
