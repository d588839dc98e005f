"""Batches in the order of steps, collected on request or asynchronously by a thread
(`rollout.max_staleness`); the gate that holds prompts back during a weight update.

With `rollout.max_staleness: k` a thread collects the next k batches while the learner works. The
batch of step s is started once the learner has requested that of step s - k, and not before the
sampler serves a policy that is at most k steps older than the one that step s starts from. With
`rollout.in_flight: drain` a weight update waits for the responses in progress, and no prompt is added
until it is over.

A batch is complete and in order: no response is left out for being long, and each prompt is trained
on once.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from megatron_rl.config.schema import InFlight, RolloutSection
from megatron_rl.processes import heartbeat
from megatron_rl.rollout.collect import Collected, Collector, GroupStream, ResponseSource
from megatron_rl.types import Prompt, Rollout, SamplingParams

LOOK_S = 0.2  # poll interval of waits


class SyncBatches:
    """Collection on request (`rollout.max_staleness: 0`): sampler and learner alternate."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def take(self, step: int) -> Collected:
        return self._collector.collect(step)

    def updating(self) -> AbstractContextManager[None]:
        """Wrap an update of the sampler's weights."""
        return nullcontext()

    def can_skip_sync(self, step: int) -> bool:
        """Return True if this step has a batch although the sampler refused the last update."""
        return False

    def stop(self) -> None:
        """Stop prefetching; discard the current batch."""

    def join(self) -> None:
        """Wait for the thread, after the sampler and the rewards are closed."""


class Stopped(Exception):
    """The run ends while a batch is being collected."""


class Gate:
    """Gate before a sampler's responses; with `drain`, none is in progress during an update."""

    def __init__(self, answers: ResponseSource, rollout: RolloutSection) -> None:
        self.changed = threading.Condition()
        self.stopped = False
        self._source = answers
        self._closes = rollout.in_flight is InFlight.drain
        self._open = 0
        self._closed = False

    def stream(self, params: SamplingParams, *, seed: int, step: int) -> GroupStream:
        return _Gated(self, self._source.stream(params, seed=seed, step=step))

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self.changed:
            self._closed = self._closes
            while self._closed and self._open:
                self.changed.wait(LOOK_S)
        try:
            yield
        finally:
            with self.changed:
                self._closed = False
                self.changed.notify_all()

    def enter(self, prompts: int) -> bool:
        """Add so many prompts, unless the gate is closed."""
        with self.changed:
            if not self._closed:
                self._open += prompts
            return not self._closed

    def leave(self, prompts: int) -> None:
        with self.changed:
            self._open -= prompts
            self.changed.notify_all()

    def pass_through(self) -> None:
        """Wait until the gate is open."""
        with self.changed:
            while self._closed and not self.stopped:
                self.changed.wait(LOOK_S)
        self.check()

    def check(self) -> None:
        if self.stopped:
            raise Stopped


class _Gated:
    """GroupStream behind the gate: prompts added while it is closed start when it opens."""

    def __init__(self, gate: Gate, inner: GroupStream) -> None:
        self._gate = gate
        self._inner = inner
        self._open = 0
        self._later: list[tuple[Sequence[Prompt], int]] = []

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        if not self._gate.enter(len(prompts)):
            self._later.append((prompts, first_group))
            return
        self._open += len(prompts)
        self._inner.add(prompts, first_group)

    def finished(self) -> list[list[Rollout]]:
        while self._open or self._later:
            if groups := self._inner.finished() if self._open else []:
                self._open -= len(groups)
                self._gate.leave(len(groups))
                self._gate.check()
                return groups
            self._gate.pass_through()
            later = self._later
            self._later = []
            for prompts, first_group in later:
                self.add(prompts, first_group)
        return []

    def close(self) -> None:
        self._inner.close()
        self._gate.leave(self._open)
        self._open = 0


class AsyncBatches:
    """Batches collected asynchronously by a thread, which starts at the first request."""

    def __init__(
        self,
        collector: Collector,
        gate: Gate,
        rollout: RolloutSection,
        last: int,
        served: Callable[[], int],
    ) -> None:
        """`last`: last step of the run. `served`: the policy version that the sampler serves."""
        self._collector = collector
        self._gate = gate
        self._last = last
        self._served = served
        self._most = rollout.max_staleness
        self._changed = gate.changed
        self._ready: deque[Collected] = deque()
        self._requested = 0  # in steps
        self._begun = 0
        self._failure: BaseException | None = None
        # one thread for the whole run: processes that it restarts end with it
        self._thread = threading.Thread(target=self._collect_all, name="collecting", daemon=True)

    def take(self, step: int) -> Collected:
        with self._changed:
            self._requested = step
            self._changed.notify_all()
        if not self._thread.is_alive() and self._failure is None:
            self._begun = step - 1
            self._thread.start()
        with heartbeat.delegate_wait():
            collected = self._next()
        seconds = sum(span.end - span.begin for span in collected.spans if span.lane == "sampler")
        metrics = {"rollout/ready_ahead": len(self._ready), "rollout/seconds": seconds}
        return replace(collected, metrics=collected.metrics | metrics)

    @contextmanager
    def updating(self) -> Iterator[None]:
        with heartbeat.delegate_wait(), self._gate.closed():
            yield

    def can_skip_sync(self, step: int) -> bool:
        with self._changed:
            return self._fresh_enough(step) or self._begun >= step

    def stop(self) -> None:
        with self._changed:
            self._gate.stopped = True
            self._changed.notify_all()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _next(self) -> Collected:
        with self._changed:
            while not self._ready:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait(LOOK_S)
            return self._ready.popleft()

    def _fresh_enough(self, step: int) -> bool:
        return step - 1 - self._served() <= self._most

    def _collect_all(self) -> None:
        try:
            while self._begins_next():
                collected = self._collector.collect(self._begun)
                with self._changed:
                    self._ready.append(collected)
                    self._changed.notify_all()
        except BaseException as error:  # any exception: raised again in the main thread
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _begins_next(self) -> bool:
        """Wait until the next step may be started; False if the run ends."""
        with self._changed:
            while not self._gate.stopped:
                step = self._begun + 1
                in_time = step <= min(self._requested + self._most, self._last)
                if in_time and self._fresh_enough(step):
                    self._begun = step
                    return True
                self._changed.wait(LOOK_S)
        return False
