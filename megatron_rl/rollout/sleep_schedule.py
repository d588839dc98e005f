"""Sleep and wake calls to engines that share GPUs with the learner, around generation and syncs.

Engines sleep from their start to the first sync, so that they start alone, and from the last
response of a step to the next sync. Order at a sync: wake weights, sync, wake cache. The cache's
memory is free while the update is staged, and engines take no request before the sync is complete.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_rl.config.schema import Sleep
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.sampler.sampler import Sampler

SLEEP_LEVELS = {Sleep.offload: 1, Sleep.discard: 2}  # vLLM's


class SleepSchedule:
    """Sleep schedule of an engine that shares GPUs with the learner; no-op if sleep is disabled."""

    def __init__(self, sampler: Sampler, mode: Sleep) -> None:
        self._sampler = sampler
        self._level = SLEEP_LEVELS.get(mode)
        self._asleep = False

    def sleep(self) -> None:
        """Put the engine to sleep: after its start, and after the last request before a sync."""
        if self._level is not None and not self._asleep:
            self._sampler.sleep(self._level)
            self._asleep = True

    def wake(self) -> None:
        """Wake the engine for a request that comes before the next sync does."""
        with self.syncing():
            pass

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Wake the engine around a sync. If the sync fails, the cache sleeps on: requests fail."""
        if self._asleep:
            self._sampler.wake([WEIGHTS])
        yield
        if self._asleep:
            self._sampler.wake([CACHE])
            self._asleep = False
