"""Where the time of a step goes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping


class PhaseClock:
    """Splits a step's wall clock. A phase inside another one is not counted twice."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._begun = self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def leave(self) -> str | None:
        """The phase that goes on, if there is one around."""
        self._charge()
        self._open.pop()
        return self._open[-1] if self._open else None

    def finish_step(self) -> dict[str, float]:
        self._charge()
        whole = self._since - self._begun
        claimed = math.fsum(self._seconds.values())
        split = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds, self._begun = {}, self._since
        return {**split, "time/step": whole, "time/other": max(0.0, whole - claimed)}

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


def throughput(line: Mapping[str, float]) -> dict[str, float]:
    """What a step's times say together with what it has made."""
    found = {}
    if line["time/step"] > 0 and "time/sync" in line:
        found["perf/sync_fraction"] = line["time/sync"] / line["time/step"]
    if "rollout/tokens" in line and line.get("time/rollout", 0.0) > 0:
        found["perf/rollout_tokens_per_s"] = line["rollout/tokens"] / line["time/rollout"]
    return found
