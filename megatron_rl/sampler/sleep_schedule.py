"""When an engine that shares a GPU with the learner sleeps: from its start to the first sync, so that it starts alone,
and from the last answer of a step to the next sync.

Order at a sync: wake weights, sync, wake cache. The cache's memory is free while the update is staged, and nothing
can be asked of the engine before the new version is complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from megatron_rl.config.schema import Sleep
from megatron_rl.engine.readiness import CACHE, WEIGHTS

LEVELS = {Sleep.offload: 1, Sleep.discard: 2}  # vLLM's


class Sleeper(Protocol):
    """The two calls of protocol.Sampler that matter here."""

    def sleep(self, level: int = 1) -> None: ...

    def wake(self, tags: list[str] | None = None) -> None: ...


class SleepSchedule:
    def __init__(self, sampler: Sleeper, mode: Sleep) -> None:
        self._sampler, self._level = sampler, LEVELS.get(mode)
        self._asleep = False

    def sleep(self) -> None:
        """Once it has started, and after the last request before a sync; an earlier request needs `wake`."""
        if self._level is not None and not self._asleep:
            self._sampler.sleep(self._level)
            self._asleep = True

    def wake(self) -> None:
        """Before a request that no sync has woken the engine for."""
        if self._asleep:
            self._sampler.wake([WEIGHTS])
            self._wake_cache()

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Around a sync. One that fails leaves the cache asleep: the engine goes on refusing."""
        if self._asleep:
            self._sampler.wake([WEIGHTS])
        yield
        if self._asleep:
            self._wake_cache()

    def _wake_cache(self) -> None:
        self._sampler.wake([CACHE])
        self._asleep = False
