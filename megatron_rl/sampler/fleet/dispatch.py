"""Prompts to replicas: the least loaded one answers next, and what a dying one leaves undone goes to the others.

Jobs may be added as long as it is open. Every job's answers come back exactly once, whichever replica they come from.
Every wait has a limit: the replica's own deadline for an answer, `TRIES` for a job, `patience_s` while there is no
replica.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import Format
from megatron_rl.sampler.fleet.replica import Answer, NoServerLeft, Replica, ReplicaGone, RequestRefused
from megatron_rl.sampler.protocol import SamplerError
from megatron_rl.types import SamplingParams

TRIES = 4  # replicas that may die over one prompt before the prompt is suspected
QUEUED = 1.25  # sequences given to a replica, relative to what it decodes at once: enough to refill its batch


@dataclass
class Job:
    """One prompt to be answered `samples` times by one replica."""

    number: int  # whoever adds it knows it by this
    token_ids: tuple[int, ...]
    seed: int
    name: str = "a prompt"
    tries: int = 0  # so far, which ended with the replica

    def __str__(self) -> str:
        return f"{self.name} of {len(self.token_ids)} tokens"


@dataclass(frozen=True)
class Done:
    job: Job
    answers: list[Answer]
    format: Format
    version: int  # the fleet's when the job was given out


@dataclass(frozen=True)
class _Given:
    job: Job
    replica: Replica
    since: int  # place of the version in `served`


class Dispatcher:
    """Used from the fleet's event loop only."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        params: SamplingParams,
        *,
        served: Sequence[int],
        max_sequences: int,
        patience_s: float,
        on_gone: Callable[[Replica, str], None],
    ) -> None:
        """`served`: the fleet's policy versions so far, the present one last; `on_gone` is told of every failure."""
        self.retried = 0
        self.changed = asyncio.Event()  # to be set when a replica comes back, is given up, or has been updated
        self._replicas, self._params, self._served = replicas, params, served
        self._room, self._patience_s = max(int(QUEUED * max_sequences), params.samples), patience_s
        self._on_gone = on_gone
        self._waiting = deque[Job]()
        self._running: dict[asyncio.Task[list[Answer]], _Given] = {}
        self._load = Counter[str]()  # sequences of its own, by replica: another dispatcher's take no room here
        self._done: list[Done] = []
        self._news = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._closed: str | None = None  # why, where it was not its user

    def add(self, jobs: Iterable[Job]) -> None:
        self._waiting.extend(jobs)
        self.changed.set()
        if self._work is None:
            self._work = asyncio.create_task(self._run())
            self._work.add_done_callback(self._ended)

    async def finished(self) -> list[Done]:
        """Return the jobs that are complete by now; wait for one. Empty: none is open any more."""
        while not self._done and self._works and (self._waiting or self._running):
            self._news.clear()
            await self._news.wait()
        if not self._done:
            self._raise_failure()
        done, self._done = self._done, []
        return done

    async def close(self, why: str | None = None) -> None:
        """Give up what is open: replicas are told to stop. `why`: an error for whoever still waits."""
        self._closed = why
        self._waiting.clear()
        self._done.clear()
        if self._work is None:
            self._news.set()
            return
        self._work.cancel()
        await asyncio.wait([self._work])

    @property
    def _works(self) -> bool:
        return self._work is not None and not self._work.done()

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled():
            work.exception()  # asyncio complains of those that nobody has asked for
        self._news.set()

    def _raise_failure(self) -> None:
        if self._closed:
            raise SamplerError(self._closed)
        if self._work is not None and self._work.done() and not self._work.cancelled():
            self._work.result()

    async def _run(self) -> None:
        try:
            while True:
                self._assign()
                if self._waiting and not self._running:
                    await self._wait_for_a_replica()
                    continue
                changed = asyncio.ensure_future(self.changed.wait())
                try:
                    await asyncio.wait([*self._running, changed], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    changed.cancel()
                self.changed.clear()
                for task in [task for task in self._running if task.done()]:
                    self._collect(task)
        finally:
            await self._cancel_all()

    def _assign(self) -> None:
        while self._waiting:
            usable = [replica for replica in self._replicas if self._can_take_one(replica)]
            if not usable:
                return
            replica = min(usable, key=lambda one: (one.load, one.served))
            given = _Given(self._waiting.popleft(), replica, len(self._served) - 1)
            job = given.job
            task = asyncio.ensure_future(replica.generate(job.token_ids, job.seed, self._params))
            self._count(replica, self._params.samples)
            replica.running.add(task)
            self._running[task] = given

    def _can_take_one(self, replica: Replica) -> bool:
        current = replica.ready and not replica.updating and replica.version == self._served[-1]
        load = self._load[replica.name]
        return current and (load == 0 or load + self._params.samples <= self._room)

    def _count(self, replica: Replica, sequences: int) -> None:
        replica.load += sequences
        self._load[replica.name] += sequences

    def _collect(self, task: asyncio.Task[list[Answer]]) -> None:
        given = self._release(task)
        replica, job = given.replica, given.job
        if task.cancelled():  # its supervisor took the replica out
            self._retry(job, replica.reason)
            return
        try:
            answers = task.result()
        except ReplicaGone as error:
            self._on_gone(replica, str(error))
            self._retry(job, str(error))
            return
        except RequestRefused as error:
            raise SamplerError(f"{job} cannot be answered: {error}") from None
        allowed = self._served[given.since :]  # weights that the fleet has had since
        other = {version for answer in answers for version, _ in answer.spans} - set(allowed)
        if other:
            reason = f"{replica.name} answered with policy version {min(other)}, not {' or '.join(map(str, allowed))}"
            self._on_gone(replica, reason)
            self._retry(job, reason)
            return
        replica.served += len(answers)
        self._done.append(Done(job, answers, replica.format, allowed[0]))
        self._news.set()

    def _release(self, task: asyncio.Task[list[Answer]]) -> _Given:
        given = self._running.pop(task)
        given.replica.running.discard(task)
        self._count(given.replica, -self._params.samples)
        return given

    def _retry(self, job: Job, reason: str) -> None:
        job.tries += 1
        self.retried += 1
        if job.tries >= TRIES:
            raise SamplerError(f"{job} was given up: {TRIES} tries ended with the server, the last one with: {reason}")
        self._waiting.appendleft(job)

    async def _wait_for_a_replica(self) -> None:
        """Wait until a replica is ready; raise where none is in time, or can be. An update has limits of its own."""
        deadline = time.monotonic() + self._patience_s
        while not any(self._can_take_one(replica) for replica in self._replicas):
            if any(replica.updating for replica in self._replicas):
                deadline = time.monotonic() + self._patience_s
            remaining = deadline - time.monotonic()
            if remaining <= 0 or all(replica.given_up for replica in self._replicas):
                raise NoServerLeft(self._replicas, self._served[-1], self._patience_s)
            try:
                await asyncio.wait_for(self.changed.wait(), remaining)
            except TimeoutError:
                continue
            self.changed.clear()

    async def _cancel_all(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for task in list(self._running):
            self._release(task)
