"""What nodes tell each other: JSON, one value on a line. What cannot be read is nobody's answer."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

ARRIVE_S = 120.0  # a node reads Python from a busy file system
ANSWER_S = 60.0
RING_S = 180.0  # torch is read, connections are made, and the sums take three seconds
NO_RESULT = f"no result within {RING_S:.0f} s"
LONGEST = 1 << 20  # bytes of an answer


class Line:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, seconds: float, **said: Any) -> Any:
        if said:
            await self.say(**said)
        try:
            return json.loads(await asyncio.wait_for(self._reader.readline(), seconds))
        except (OSError, ValueError, TimeoutError):
            return None

    async def say(self, **said: Any) -> None:
        with suppress(OSError):
            self._writer.write(json.dumps(said).encode() + b"\n")
            await self._writer.drain()
