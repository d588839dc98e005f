"""Dispatcher of prompts to engines: to the engine with their group's prefix, else to the least
loaded; requests of a failed engine move to others.

All samples of a prompt go to one engine, which has its prefix cached. Every request gets exactly
one response, from any engine. Every wait has a limit: the engine's own timeout for a response,
`TRIES` for a request, `patience_s` while no engine is available.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.processes.threads import cancel_all, tracked
from megatron_rl.sampler.client.interface import EngineUnavailable, RequestRefused, SamplerError
from megatron_rl.sampler.replica import NoServerLeft, Replica, State
from megatron_rl.types import Completion, Prompt, Rollout, SamplingParams, written

GIVEN_UP = "the request was given up"
TRIES = 4  # engines that may die on one prompt before the prompt is suspected
# sequences given to an engine, relative to its batch size: enough to refill the batch
QUEUED = 1.25
POLL_S = 0.01  # poll for the end of the update whose weights a response already has


@dataclass(frozen=True)
class Request:
    """Prompt for one engine, with as many samples as its parameters say."""

    group: int
    prompt: Prompt
    seed: int  # of the first sample; the others count upwards
    params: SamplingParams
    # requests with the same key go to the same engine, which has their prefix, while it has room
    key: str = ""

    def __str__(self) -> str:
        return f"prompt {self.prompt.id} of {len(self.prompt.token_ids)} tokens"


class Meter:
    """Count of tokens, and of the time in which a request was open."""

    def __init__(self) -> None:
        self.tokens = self.retried = 0
        self._lock = threading.Lock()
        self._open = 0
        self._since = 0.0
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._seconds + (time.perf_counter() - self._since if self._open else 0.0)

    def count(self, requests: int, tokens: int = 0) -> None:
        """Add `requests` to the number of open requests (negative: remove)."""
        with self._lock:
            now = time.perf_counter()
            if self._open:
                self._seconds += now - self._since
            self._since = now
            self._open += requests
            self.tokens += tokens


class Dispatcher:
    """Requests that wait for an engine, and those in progress. Used from the sampler's event loop
    only.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        served: Sequence[int],
        max_sequences: int,
        patience_s: float,
        on_gone: Callable[[Replica, str], None],
        meter: Meter,
        patient: bool = True,
    ) -> None:
        """`served`: the policy versions so far, the current one last; `on_gone` is called with
        every failure.

        `patient`: see Engine.generate.
        """
        self._replicas = replicas
        self._served = served
        self._patient = patient
        self._max_sequences = max_sequences
        self._patience_s = patience_s
        self._on_gone = on_gone
        self._meter = meter
        # requests without an engine, in order, and the engine that each will get
        self._waiting = deque[tuple[Request, asyncio.Future[Replica]]]()
        self._hopeful_at = time.monotonic()  # when an engine last worked, or was about to be ready
        # own sequences by engine: those of other dispatchers do not count here
        self._load = Counter[str]()
        self._homes: dict[str, Replica] = {}  # the engine that last took a request of a key
        self._answering: set[asyncio.Future[Any]] = set()
        self._failure: SamplerError | None = None

    async def ask(self, request: Request) -> list[Rollout]:
        """Return the response to a request; cancellation stops it at the engine."""
        if self._failure is not None:
            raise self._failure
        self._meter.count(1)
        tokens = 0
        try:
            rollouts = await tracked(self._answered(request), self._answering, self._closed)
            tokens = sum(len(one.token_ids) for one in rollouts)
        finally:
            self._meter.count(-1, tokens)
        return rollouts

    def notify(self) -> None:
        """React to an engine that came back, was abandoned, was updated, or has room: give it
        waiting requests, or fail them if no engine is left or none came in time.
        """
        late = self._patience_left() <= 0 or all(one.failed for one in self._replicas)
        if late and self._waiting and self._failure is None:
            self._failure = NoServerLeft(self._replicas, self._served[-1], self._patience_s)
        while self._waiting:
            request, replica = self._waiting[0]
            if self._failure is not None:
                replica.set_exception(self._failure)
            elif usable := [one for one in self._replicas if self._can_take(one, request)]:
                replica.set_result(self._chosen(request, usable))
            else:
                return
            self._waiting.popleft()

    async def close(self, why: str = GIVEN_UP) -> None:
        """Cancel open requests at the engines. `why`: the error that waiting callers get."""
        self._failure = self._failure or SamplerError(why)
        await cancel_all(self._answering)

    def _closed(self) -> SamplerError:
        return self._failure or SamplerError(GIVEN_UP)

    async def _answered(self, request: Request) -> list[Rollout]:
        reason = ""
        for attempt in range(TRIES):
            replica = await self._next_replica(request, first=attempt > 0)
            since = len(self._served) - 1
            try:
                completions = await replica.wait_for(
                    self._completions(request, replica, self._served[since])
                )
                while replica.state is State.updating and self._others(completions, since):
                    # the notice that they are loaded has not arrived yet
                    await asyncio.sleep(POLL_S)
                if others := self._others(completions, since):
                    allowed = " or ".join(map(str, self._served[since:]))
                    raise EngineUnavailable(
                        f"{replica.name} returned policy version {min(others)}, not {allowed}"
                    )
            except EngineUnavailable as error:
                reason = str(error)
                self._on_gone(replica, reason)
            except RequestRefused as error:
                raise SamplerError(f"{request} failed: {error}") from None
            else:
                replica.served += len(completions)
                return [
                    _rollout(request, sample, one, replica)
                    for sample, one in enumerate(completions)
                ]
            finally:
                self._count(replica, -request.params.samples)
                self.notify()
            self._meter.retried += 1
        raise SamplerError(
            f"{request} failed in {TRIES} tries, each of which ended its server; "
            f"the last error: {reason}"
        )

    async def _completions(
        self, request: Request, replica: Replica, version: int
    ) -> list[Completion]:
        params = request.params
        # greedy samples are identical
        distinct = 1 if params.temperature == 0 else params.samples
        samples = [
            asyncio.ensure_future(
                replica.engine.generate(
                    request.prompt.token_ids,
                    params,
                    request.seed + sample,
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

    def _others(self, completions: Sequence[Completion], since: int) -> set[int]:
        """Return the policy versions of the tokens that were not served since the request was
        dispatched.
        """
        versions = set[int]().union(*(one.all_versions for one in completions))
        return versions - set(self._served[since:])

    async def _next_replica(self, request: Request, first: bool) -> Replica:
        """Wait for an engine with room, behind or before the requests that wait already. The
        request counts as the engine's from then on.
        """
        if not self._waiting:
            self._hopeful_at = time.monotonic()
        replica: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        waiting = request, replica
        if first:
            self._waiting.appendleft(waiting)
        else:
            self._waiting.append(waiting)
        self.notify()
        try:
            while not replica.done():
                await asyncio.wait([replica], timeout=self._patience_left())
                self.notify()
        except asyncio.CancelledError:
            if not replica.done():
                self._waiting.remove(waiting)
            elif replica.exception() is None:
                self._count(replica.result(), -request.params.samples)
            self.notify()
            raise
        return replica.result()

    def _chosen(self, request: Request, usable: Sequence[Replica]) -> Replica:
        replica = self._homes.get(request.key)
        if replica is None or replica not in usable:
            replica = min(usable, key=lambda one: (one.load, one.served))
        if request.key:
            self._homes[request.key] = replica
        self._count(replica, request.params.samples)
        return replica

    def _patience_left(self) -> float:
        """Return the seconds until requests without an engine fail. The clock stands while an
        engine works, or is about to be ready.
        """
        states = {replica.state for replica in self._replicas}
        if self._load.total() > 0 or not states.isdisjoint((State.behind, State.updating)):
            self._hopeful_at = time.monotonic()
        return self._hopeful_at + self._patience_s - time.monotonic()

    def _can_take(self, replica: Replica, request: Request) -> bool:
        current = replica.state is State.ready and replica.version == self._served[-1]
        load = self._load[replica.name]
        # a single engine is given everything: batches must not depend on when samples finish
        alone = len(self._replicas) == 1
        return current and (
            load == 0 or alone or load + request.params.samples <= self._room(replica, request)
        )

    def _room(self, replica: Replica, request: Request) -> int:
        """Return the number of sequences to give an engine: its batch size, as far as its cache
        holds them, and a margin.
        """
        sequences = self._max_sequences
        if replica.cache_tokens:
            longest = len(request.prompt.token_ids) + request.params.max_tokens
            sequences = min(sequences, replica.cache_tokens // longest)
        return int(QUEUED * sequences)

    def _count(self, replica: Replica, sequences: int) -> None:
        replica.load += sequences
        self._load[replica.name] += sequences


def _rollout(request: Request, sample: int, completion: Completion, replica: Replica) -> Rollout:
    return Rollout(
        **vars(completion),
        prompt=request.prompt,
        group=request.group,
        sample=sample,
        loss_mask=written(len(completion.token_ids)),
        format=replica.format.value,
    )
