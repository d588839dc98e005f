"""Supervisor of one engine: starts, watches, restarts it, brings its weights up to date;
`SamplerState` that all share.

One task per engine, on the sampler's event loop. An engine serves only after it has received
the current policy version. One that was given by address is not restarted, only looked for
until it answers again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import Format, Transport
from megatron_rl.processes.health import EngineHealth
from megatron_rl.processes.heartbeat import own
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.engine_process import END_GRACE_S, EngineProcess, ProcessSettings
from megatron_rl.sampler.client.interface import EngineGone, SamplerError, UpdateStep
from megatron_rl.sampler.client.lines import ENDED, PortLine, SocketLine
from megatron_rl.sampler.dispatch import Dispatcher
from megatron_rl.sampler.replica import Replica
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

MAX_RESTARTS = 3  # of each engine: one that goes on dying is ill
POLL_S = 0.2
PROBE_EVERY_S = 2.0  # between two looks at every engine
SLOW = 2  # looks in a row without an answer of the engine until somebody is told
END_S = 1.0  # from the end of its socket to that of a process
UNANSWERED = 3  # looks in a row without an answer until an engine counts as gone

# a step of an update, and its arguments by format
Told = tuple[UpdateStep, dict[Format, dict[str, Any]]]


@dataclass
class SamplerState:
    """State that supervisors, dispatchers and updates share; used on the event loop only."""

    start_timeout_s: float
    request_timeout_s: float
    max_tokens: int  # of a prompt and its answer together: what every engine must take
    vocabulary: int
    note: Callable[[str], None]
    transport: Transport = Transport.file
    init_info: dict[str, Any] | None = None  # what engines were told before the first update
    # policy versions so far, the current one last
    served: list[int] = field(default_factory=lambda: [NO_VERSION])
    # the update that brought its weights, for re-syncs
    kept_update: list[Told] = field(default_factory=list)
    restarted: int = 0  # engines, so far
    dispatchers: list[Dispatcher] = field(default_factory=list)  # those that are open
    # one update, or one re-sync, at a time
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    # the learner has the engines' GPUs: one that has died starts again afterwards
    asleep: bool = False

    @property
    def version(self) -> int:
        return self.served[-1]

    def init_of(self, replica: Replica) -> dict[str, Any]:
        """vLLM's trainer tells every engine that its workers come first."""
        info = dict(self.init_info or {})
        if "rank_offset" in info:
            info["rank_offset"] += replica.workers_before
        return {"init_info": info}

    def tell(self) -> None:
        """Tell dispatchers that an engine came back, was given up, or has been updated."""
        for dispatcher in self.dispatchers:
            dispatcher.notify()

    def mark_down(self, replica: Replica, reason: str) -> None:
        reason = reason.removeprefix(f"{replica.name}: ")
        if replica.ready:
            self.note(f"{replica.name} is out: {reason}")
        replica.mark_down(reason)
        self.tell()


class Supervisor:
    """The life of one engine."""

    def __init__(
        self,
        replica: Replica,
        start: ProcessSettings | None,
        state: SamplerState,
        address: str,
        key: str,
    ) -> None:
        """`start`: how the run starts this engine; None where it was given by address."""
        self.replica = replica
        self._start = start
        self._state = state
        self._address = address
        self._key = key
        self._child: EngineClient | None = None  # of the process that was started here
        self.first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start_process(self) -> None:
        if self._start is None:
            return
        replica = self.replica
        replica.process = EngineProcess(self._start, restarts=replica.restarts)
        own(replica.name, replica.process)
        self._child = replica.engine = self._client(SocketLine(replica.process.line))
        replica.health = EngineHealth(self._child.status, replica.process.pid)

    def _client(self, line: SocketLine | PortLine) -> EngineClient:
        return EngineClient(
            self.replica.name, line, self._state.request_timeout_s, self._state.vocabulary
        )

    async def run(self) -> None:
        """Look after the engine until cancelled, or until it is given up."""
        replica = self.replica
        while True:
            while self._state.asleep and self._start is not None:
                await asyncio.sleep(POLL_S)
            try:
                await self._bring_up()
            except WeightSyncError as error:
                self._state.note(
                    f"{replica.name} refuses policy version {self._state.version} as it is kept "
                    f"({error}). This takes one of its {MAX_RESTARTS} restarts, and so does each "
                    "further try before the next version"
                )
                await self._failed(f"the re-sync was refused: {error}")
            except (
                Exception
            ) as error:  # every kind: an engine without its supervisor would be lost in silence
                await self._failed(
                    str(error)
                    if isinstance(error, SamplerError)
                    else f"{type(error).__name__}: {error}"
                )
            else:
                await self._watch()
            if replica.given_up:
                self._state.tell()
                return

    async def close(self, shut: bool = False) -> None:
        """Hang up. `shut`: workers of a larger engine share memory that only they release, so that
        it is asked to.
        """
        child = self._child
        process = self.replica.process
        if shut and child is not None and process is not None and process.settings.workers > 1:
            child.ask_to_end()
            await asyncio.to_thread(process.wait, END_GRACE_S)
        await self.replica.engine.close()

    async def _bring_up(self) -> None:
        """Bring an engine, restarted here or given by address, to serve the current policy."""
        replica = self.replica
        state = self._state
        again = self.first_start.done()
        if replica.process is None and self._start is not None:
            state.restarted += 1
            self.start_process()
            count = f"{replica.restarts} of {MAX_RESTARTS} restarts"
            state.note(f"{replica.name} starts again ({count}): {replica.reason}")
        if self._child is not None and replica.process is not None:
            await self._child.open()
            await self._child.start(replica.process.settings.arguments, state.start_timeout_s)
            await asyncio.to_thread(replica.process.note_shared_memory)
        elif self._start is None:
            await self._connect()
        await self._unless_gone(self._make_current())
        if again:
            state.note(f"{replica.name} is back with policy version {replica.version}")
        state.tell()

    async def _connect(self) -> None:
        replica = self.replica
        await replica.engine.close()
        line = PortLine(self._address, self._key)
        client = replica.engine = self._client(line)
        await self._until_healthy()
        if self._key and await line.answers_without_key():
            raise EngineGone(
                f"{self._address} moves weights for whoever asks, without the key; start it with "
                "`megatron-rl serve`"
            )
        await client.open()
        longest = (await client.status()).get("longest", 0)
        if longest < self._state.max_tokens:
            raise EngineGone(
                f"{self._address} takes {longest} tokens, the recipe needs "
                f"{self._state.max_tokens}: start it with rollout.max_prompt_tokens and "
                "rollout.max_response_tokens of this recipe"
            )

    async def _make_current(self) -> None:
        replica = self.replica
        state = self._state
        if self._start is None:  # whoever used it before may have left in the middle of an update
            await replica.engine.update("forget")
        if state.init_info is not None:
            await replica.engine.update("init", **state.init_of(replica))
        replica.cache_tokens = (await replica.engine.status()).get("cache_tokens", 0)
        replica.come_up()
        if not self.first_start.done():
            self.first_start.set_result(None)
        async with state.updating:
            if not replica.up:
                raise EngineGone(replica.reason)
            if replica.version != state.version:
                for step, by_format in state.kept_update:
                    await replica.engine.update(step, **by_format.get(replica.format, {}))
            replica.hold(state.version)

    async def _until_healthy(self) -> None:
        replica = self.replica
        state = self._state
        deadline = time.monotonic() + state.start_timeout_s
        while not (look := await replica.look()).alive:
            if time.monotonic() > deadline:
                limit = f"sampler.start_timeout_s={state.start_timeout_s:g}"
                raise EngineGone(
                    f"no answer from {self._address} in {limit}; the last try: {look.slow}"
                )
            await asyncio.sleep(POLL_S)

    async def _unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work with the engine, and look at it meanwhile."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineGone(watching.result())
            working.result()
        finally:
            working.cancel()
            watching.cancel()

    async def _watch(self) -> None:
        """Returns once the engine is gone, or was taken out by whoever asked it something."""
        reason = await self._until_gone(lambda: not self.replica.up)
        self._state.mark_down(self.replica, reason)
        await self._failed(reason)

    async def _until_gone(self, taken_out: Callable[[], bool] = lambda: False) -> str:
        """Wait for the engine's end and say what it was: its process ended, or it left
        several looks unanswered.
        """
        replica = self.replica
        state = self._state
        slow = 0
        unanswered = 0
        next_look = time.monotonic() + PROBE_EVERY_S
        while not taken_out():
            await asyncio.sleep(min(POLL_S, PROBE_EVERY_S))
            if replica.process and (ended := replica.process.ended()):
                return ended
            if time.monotonic() < next_look:
                continue
            look = await replica.look()
            next_look = time.monotonic() + PROBE_EVERY_S
            unanswered = 0 if look.alive else unanswered + 1
            if unanswered >= UNANSWERED:
                return f"did not answer {UNANSWERED} times in a row: {look.slow}"
            if slow >= SLOW and not look.slow:
                state.note(f"{replica.name} answers again")
            slow = slow + 1 if look.slow else 0
            if slow == SLOW:
                state.note(f"{replica.name} is slow to answer: {look.slow}")
        return replica.reason

    async def _failed(self, reason: str) -> None:
        """Clear away what is left; decide whether there is another try."""
        replica = self.replica
        state = self._state
        process = replica.process
        # its sockets end a moment before it does, and it may be known by now how
        if process is not None:
            await asyncio.to_thread(process.wait, END_S)
            reason = (process.ended() if ENDED in reason else None) or reason
        replica.mark_down(reason)
        await self.close()
        details = reason
        if process is not None:
            details = f"{reason}. The end of {process.log_path}:\n{process.log_end()}"
            await asyncio.to_thread(process.end)
            replica.process = None
        if not self.first_start.done():
            replica.give_up(details)
            self.first_start.set_exception(SamplerError(f"{replica.name} did not start: {details}"))
        elif state.transport != Transport.file:
            replica.give_up(
                f"an engine that dies comes back with sync.transport=file alone: {details}"
            )
        elif self._start is None:
            await asyncio.sleep(PROBE_EVERY_S)
        elif replica.restarts >= MAX_RESTARTS:
            replica.give_up(f"given up after {MAX_RESTARTS} restarts: {details}")
            state.note(f"{replica.name} is given up after {MAX_RESTARTS} restarts: {reason}")
        else:
            replica.restarts += 1
