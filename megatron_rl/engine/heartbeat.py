"""Whether a server's engine still works: what the server's /health answers.

vLLM's own /health says that the engine's process exists. One that was stopped, or whose threads have died, exists as
well. Here the engine itself is asked. One that does not answer at once may be busy with a long prefill, an update
or a compilation; then its processes use the CPU. One that neither answers nor works hangs.
"""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_rl.process import work_below

WAIT_S = 4.0
BUSY_SHARE = 0.05  # of a core: an engine that only waits uses far less

Answer = tuple[int, dict[str, str]]


class Heartbeat:
    def __init__(self, engine: Any, server: int) -> None:
        """`server`: the process whose children are the engine."""
        self._engine, self._server = engine, server
        self._asked: asyncio.Future[Any] | None = None  # one question at a time, however often somebody looks

    async def look(self) -> Answer:
        before, _ = work_below(self._server)
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(self._engine.collective_rpc("weight_update_building"))
        await asyncio.wait([self._asked], timeout=WAIT_S)
        if self._asked.done():
            error = self._asked.exception()
            return (200, {"engine": "answers"}) if error is None else (503, {"error": f"its engine failed: {error}"})
        after, stopped = work_below(self._server)
        if stopped:
            return 503, {"error": f"its engine's process {stopped[0]} is stopped"}
        if after - before >= BUSY_SHARE * WAIT_S:
            return 200, {"engine": "busy"}
        return 503, {"error": f"its engine neither answers nor works (for {WAIT_S:g} s)"}
