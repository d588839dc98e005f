"""Dispatches prompts to engines: the one with their group's prefix, else the least loaded; a dying
one's go to others.

All samples of a prompt go to one engine, which has its prefix. Jobs may be added as long as it
is open. Every job's answers come back exactly once, whichever engine they come from. Every wait
has a limit: the engine's own deadline for an answer, `TRIES` for a job, `patience_s` while there
is no engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from megatron_rl.sampler.client.interface import (
    Completion,
    EngineGone,
    RequestRefused,
    SamplerError,
)
from megatron_rl.sampler.replica import NoServerLeft, Replica, State
from megatron_rl.types import Prompt, SamplingParams

TRIES = 4  # engines that may die over one prompt before the prompt is suspected
# sequences given to an engine, relative to what it decodes at once: enough to refill its batch
QUEUED = 1.25


@dataclass(eq=False)
class Job:
    """Prompt to be answered `samples` times by one engine."""

    group: int
    prompt: Prompt
    seed: int  # of the first sample; the next ones count upwards
    tries: int = 0  # so far, which ended with the engine
    params: SamplingParams | None = None  # None: the dispatcher's
    # jobs with the same one go to the same engine, which has their prefix, as long as it takes them
    key: str = ""
    # of whoever waits for this job alone; None: `finished` tells of it
    answer: asyncio.Future[Done] | None = None
    given_up: bool = False

    def __str__(self) -> str:
        return f"prompt {self.prompt.id} of {len(self.prompt.token_ids)} tokens"


@dataclass(frozen=True)
class Done:
    job: Job
    completions: list[Completion]
    format: str
    version: int  # the one that was served when the job was given out


@dataclass(frozen=True)
class _Given:
    job: Job
    replica: Replica
    since: int  # place of the version in `served`


class Dispatcher:
    """Used from the sampler's event loop only."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        params: SamplingParams,
        *,
        served: Sequence[int],
        max_sequences: int,
        patience_s: float,
        on_gone: Callable[[Replica, str], None],
        patient: bool = True,
    ) -> None:
        """`served`: the policy versions so far, the present one last; `on_gone` is told
        of every failure.

        `patient`: see Engine.generate.
        """
        self.retried = 0
        # to be set when an engine comes back, is given up, or has been updated
        self.changed = asyncio.Event()
        self._replicas = replicas
        self._params = params
        self._served = served
        self._patient = patient
        self._max_sequences = max_sequences
        self._patience_s = patience_s
        self._on_gone = on_gone
        self._waiting = deque[Job]()
        self._running: dict[asyncio.Future[list[Completion]], _Given] = {}
        # sequences of its own, by engine: another dispatcher's take no room here
        self._load = Counter[str]()
        # of those that run: they have ended
        self._over: list[asyncio.Future[list[Completion]]] = []
        self._done: list[Done] = []
        self._news = asyncio.Event()
        self._homes: dict[str, Replica] = {}  # the engine that last took a job of a key
        self._asked: set[Job] = set()  # whoever waits for them alone has no answer yet
        self._work: asyncio.Task[None] | None = None
        self._closed: str | None = None  # why, where it was not its user

    def add(self, jobs: Iterable[Job]) -> None:
        if self._closed:  # nobody looks after the engines any more
            raise SamplerError(self._closed)
        self._waiting.extend(jobs)
        self.changed.set()
        if self._work is None or self._work.cancelled():
            self._work = asyncio.create_task(self._run())
            self._work.add_done_callback(self._ended)

    async def ask(self, job: Job) -> Done:
        """Answer one job; if cancelled, the engine is told to stop."""
        job.answer = asyncio.get_running_loop().create_future()
        self._asked.add(job)
        try:
            self.add([job])
            if not self._works:
                self._raise_failure()
            return await job.answer
        finally:
            self._asked.discard(job)
            if not job.answer.done() or job.answer.cancelled():
                self._give_up(job)

    def _give_up(self, job: Job) -> None:
        job.given_up = True
        with suppress(ValueError):
            self._waiting.remove(job)
        for answering, given in self._running.items():
            if given.job is job:
                answering.cancel()

    async def finished(self) -> list[Done]:
        """Return the jobs that are complete by now; wait for one. Empty: none is open any more."""
        while not self._done and self._works and (self._waiting or self._running):
            self._news.clear()
            await self._news.wait()
        if not self._done:
            self._raise_failure()
        done = self._done
        self._done = []
        return done

    async def close(self, why: str | None = None) -> None:
        """Give up what is open: engines are told to stop. `why`: an error for whoever still waits."""
        self._closed = why
        self._fail_asked(SamplerError(why or "the request was given up"))
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
        # asyncio complains of errors that nobody has asked for
        if not work.cancelled() and (error := work.exception()) is not None:
            self._fail_asked(error)
        self._news.set()

    def _fail_asked(self, error: BaseException) -> None:
        for job in self._asked:
            if job.answer is not None and not job.answer.done():
                job.answer.set_exception(error)

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
                    await self._wait_for_an_engine()
                    continue
                await self.changed.wait()
                self.changed.clear()
                over = self._over
                self._over = []
                for answering in over:
                    self._collect(answering)
        finally:
            await self._cancel_all()

    def _assign(self) -> None:
        while self._waiting:
            usable = [replica for replica in self._replicas if self._can_take_one(replica)]
            if not usable:
                return
            job = self._waiting.popleft()
            replica = self._homes.get(job.key)
            if replica not in usable:
                replica = min(usable, key=lambda one: (one.load, one.served))
            if job.key:
                self._homes[job.key] = replica
            given = _Given(job, replica, len(self._served) - 1)
            answering = asyncio.ensure_future(self._answer(given))
            self._count(replica, self._params.samples)
            replica.running.add(answering)
            self._running[answering] = given
            answering.add_done_callback(self._note_end)

    def _note_end(self, answering: asyncio.Future[list[Completion]]) -> None:
        self._over.append(answering)
        self.changed.set()

    async def _answer(self, given: _Given) -> list[Completion]:
        params = given.job.params or self._params
        version = self._served[given.since]
        # greedy samples are copies of one
        distinct = 1 if params.temperature == 0 else params.samples
        samples = [
            asyncio.ensure_future(
                given.replica.engine.generate(
                    given.job.prompt.token_ids,
                    params,
                    given.job.seed + sample,
                    version=version,
                    patient=self._patient,
                )
            )
            for sample in range(distinct)
        ]
        try:
            answers = await asyncio.gather(*samples)
        finally:
            for one in samples:
                one.cancel()
        return [answer for answer in answers for _ in range(params.samples // distinct)]

    def _can_take_one(self, replica: Replica) -> bool:
        current = replica.state is State.ready and replica.version == self._served[-1]
        load = self._load[replica.name]
        # one engine alone is given everything: what shares its batches must not hang on when
        # something was finished
        alone = len(self._replicas) == 1
        return current and (
            load == 0 or alone or load + self._params.samples <= self._room(replica)
        )

    def _room(self, replica: Replica) -> int:
        """Sequences that an engine is given: what it decodes at once, as far as its cache holds
        that many, and some.
        """
        sequences = self._max_sequences
        if replica.cache_tokens and self._waiting:
            first = self._waiting[0]
            longest = len(first.prompt.token_ids) + (first.params or self._params).max_tokens
            sequences = min(sequences, replica.cache_tokens // longest)
        return int(QUEUED * sequences)

    def _count(self, replica: Replica, sequences: int) -> None:
        replica.load += sequences
        self._load[replica.name] += sequences

    def _other_versions(self, given: _Given, completions: Sequence[Completion]) -> set[int]:
        """Those of an answer's tokens, less the weights that were served since it was asked."""
        versions = {version for one in completions for version, tokens in one.spans if tokens}
        return versions - set(self._served[given.since :])

    def _is_early(self, answering: asyncio.Future[list[Completion]]) -> bool:
        """Return True for an answer of weights that an engine has just loaded, before its reply to
        that update was handled.
        """
        given = self._running[answering]
        if (
            given.replica.state is not State.updating
            or answering.cancelled()
            or answering.exception() is not None
        ):
            return False
        return bool(self._other_versions(given, answering.result()))

    def _collect(self, answering: asyncio.Future[list[Completion]]) -> None:
        if self._is_early(answering):
            self._over.append(answering)  # looked at again once the update is over
            return
        given = self._release(answering)
        replica = given.replica
        job = given.job
        if job.given_up:
            return
        if answering.cancelled():  # its supervisor took the engine out
            self._retry(job, replica.reason)
            return
        try:
            completions = answering.result()
        except EngineGone as error:
            self._on_gone(replica, str(error))
            self._retry(job, str(error))
            return
        except RequestRefused as error:
            raise SamplerError(f"{job} cannot be answered: {error}") from None
        allowed = self._served[given.since :]
        if other := self._other_versions(given, completions):
            reason = f"{replica.name} answered with policy version {min(other)}, not {' or '.join(map(str, allowed))}"
            self._on_gone(replica, reason)
            self._retry(job, reason)
            return
        replica.served += len(completions)
        done = Done(job, completions, replica.format.value, allowed[0])
        if job.answer is None:
            self._done.append(done)
            self._news.set()
        elif not job.answer.done():
            job.answer.set_result(done)

    def _release(self, answering: asyncio.Future[list[Completion]]) -> _Given:
        given = self._running.pop(answering)
        given.replica.running.discard(answering)
        self._count(given.replica, -self._params.samples)
        return given

    def _retry(self, job: Job, reason: str) -> None:
        job.tries += 1
        self.retried += 1
        if job.tries >= TRIES:
            raise SamplerError(
                f"{job} was given up: {TRIES} tries ended with the server, the last one with: "
                f"{reason}"
            )
        self._waiting.appendleft(job)

    async def _wait_for_an_engine(self) -> None:
        """Wait until an engine is ready; raise where none is in time, or can be. An update has
        limits of its own.
        """
        deadline = time.monotonic() + self._patience_s
        while not any(self._can_take_one(replica) for replica in self._replicas):
            if any(one.state in (State.behind, State.updating) for one in self._replicas):
                deadline = time.monotonic() + self._patience_s
            remaining = deadline - time.monotonic()
            if remaining <= 0 or all(replica.given_up for replica in self._replicas):
                raise NoServerLeft(self._replicas, self._served[-1], self._patience_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), remaining)
                self.changed.clear()

    async def _cancel_all(self) -> None:
        for answering in list(self._running):
            answering.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        for answering in list(self._running):
            self._release(answering)
        self._over.clear()
