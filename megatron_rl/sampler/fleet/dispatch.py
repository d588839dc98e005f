"""Prompts to replicas: the least loaded one answers next, and what a dying one leaves undone goes to the others.

Every job's answers come back exactly once, in the order of the jobs, whichever replica they come from. Every wait has
a limit: the replica's own deadline for an answer, `TRIES` for a job, `patience_s` while there is no replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Format
from megatron_rl.sampler.fleet.replica import Answer, NoServerLeft, Replica, ReplicaGone, RequestRefused
from megatron_rl.sampler.protocol import SamplerError
from megatron_rl.types import SamplingParams

TRIES = 4  # replicas that may die over one prompt before the prompt is suspected
QUEUED = 1.25  # sequences given to a replica, relative to what it decodes at once: enough to refill its batch


@dataclass(frozen=True)
class Job:
    """One prompt to be answered `samples` times by one replica."""

    token_ids: tuple[int, ...]
    seed: int
    name: str = "a prompt"

    def __str__(self) -> str:
        return f"{self.name} of {len(self.token_ids)} tokens"


@dataclass(frozen=True)
class Done:
    answers: list[Answer]
    format: Format


@dataclass(frozen=True)
class Dispatched:
    done: list[Done]  # one for each job, in order
    retried: int


class Dispatcher:
    """One `generate` call over the fleet."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        jobs: Sequence[Job],
        params: SamplingParams,
        *,
        version: int,
        max_sequences: int,
        patience_s: float,
        changed: asyncio.Event,
        on_gone: Callable[[Replica, str], None],
    ) -> None:
        """`changed` is set whenever a replica comes back or is given up; `on_gone` is told of every failure."""
        self._replicas, self._jobs, self._params = replicas, jobs, params
        self._version, self._patience_s = version, patience_s
        self._room = max(int(QUEUED * max_sequences), params.samples)
        self._changed, self._on_gone = changed, on_gone
        self._waiting = deque(range(len(jobs)))
        self._tries = [0] * len(jobs)
        self._done: dict[int, Done] = {}
        self._running: dict[asyncio.Task[list[Answer]], tuple[int, Replica]] = {}
        self._retried = 0

    async def run(self) -> Dispatched:
        try:
            while len(self._done) < len(self._jobs):
                self._assign()
                if not self._running:
                    await self._wait_for_a_replica()
                    continue
                changed = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait([*self._running, changed], return_when=asyncio.FIRST_COMPLETED)
                changed.cancel()
                self._changed.clear()
                for task in [task for task in self._running if task.done()]:
                    self._collect(task)
        finally:
            await self._cancel_all()
        return Dispatched([self._done[index] for index in range(len(self._jobs))], self._retried)

    def _assign(self) -> None:
        while self._waiting:
            usable = [replica for replica in self._replicas if self._can_take_one(replica)]
            if not usable:
                return
            replica = min(usable, key=lambda one: (one.load, one.served))
            index = self._waiting.popleft()
            job = self._jobs[index]
            task = asyncio.ensure_future(replica.generate(job.token_ids, job.seed, self._params))
            replica.load += self._params.samples
            replica.running.add(task)
            self._running[task] = index, replica

    def _can_take_one(self, replica: Replica) -> bool:
        fits = replica.load == 0 or replica.load + self._params.samples <= self._room
        return replica.ready and replica.version == self._version and fits

    def _collect(self, task: asyncio.Task[list[Answer]]) -> None:
        index, replica = self._release(task)
        if task.cancelled():  # its supervisor took the replica out
            self._retry(index, replica.reason)
            return
        try:
            answers = task.result()
        except ReplicaGone as error:
            self._on_gone(replica, str(error))
            self._retry(index, str(error))
            return
        except RequestRefused as error:
            raise SamplerError(f"{self._jobs[index]} cannot be answered: {error}") from None
        other = {answer.version for answer in answers if answer.token_ids} - {self._version}
        if other:
            reason = f"{replica.name} answered with policy version {min(other)}, not {self._version}"
            self._on_gone(replica, reason)
            self._retry(index, reason)
            return
        replica.served += len(answers)
        self._done[index] = Done(answers, replica.format)

    def _release(self, task: asyncio.Task[list[Answer]]) -> tuple[int, Replica]:
        index, replica = self._running.pop(task)
        replica.running.discard(task)
        replica.load -= self._params.samples
        return index, replica

    def _retry(self, index: int, reason: str) -> None:
        self._tries[index] += 1
        self._retried += 1
        if self._tries[index] >= TRIES:
            raise SamplerError(
                f"{self._jobs[index]} was given up: {TRIES} tries ended with the server, the last one with: {reason}"
            )
        self._waiting.appendleft(index)

    async def _wait_for_a_replica(self) -> None:
        """Until one is ready; an error where none can be, or none is in time."""
        deadline = time.monotonic() + self._patience_s
        while not any(self._can_take_one(replica) for replica in self._replicas):
            remaining = deadline - time.monotonic()
            if remaining <= 0 or all(replica.given_up for replica in self._replicas):
                raise NoServerLeft(self._replicas, self._version, self._patience_s)
            try:
                await asyncio.wait_for(self._changed.wait(), remaining)
            except TimeoutError:
                continue
            self._changed.clear()

    async def _cancel_all(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for task in list(self._running):
            self._release(task)
