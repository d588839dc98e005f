"""Supervisor of one engine: starts, watches and restarts it, syncs its weights; `SamplerState`,
shared by all.

One task per engine, on the sampler's event loop. An engine serves only after it has received the
current policy version. An engine that was given by address is not restarted; the supervisor waits
until it is reachable again.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import Format, Transport
from megatron_rl.logs import logger
from megatron_rl.processes.health import EngineHealth
from megatron_rl.processes.heartbeat import own
from megatron_rl.sampler.client.engine_client import EngineClient
from megatron_rl.sampler.client.engine_process import END_GRACE_S, EngineProcess, ProcessSettings
from megatron_rl.sampler.client.interface import EngineUnavailable, SamplerError, UpdateStep
from megatron_rl.sampler.client.lines import ENDED, PortLine, SocketLine
from megatron_rl.sampler.dispatch import Dispatcher
from megatron_rl.sampler.replica import Replica
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

log = logger("sampler")

MAX_RESTARTS = 3  # of each engine; one that dies more often is not restarted again
POLL_S = 0.2
PROBE_EVERY_S = 2.0  # between two health checks of an engine
SLOW = 2  # failed health checks in a row before a warning
END_S = 1.0  # from the end of its socket to the end of the process
UNANSWERED = 3  # failed health checks in a row before an engine counts as unavailable

# a step of an update, and its arguments by format
UpdateCall = tuple[UpdateStep, dict[Format, dict[str, Any]]]


@dataclass
class SamplerState:
    """State that supervisors, dispatchers and updates share; used on the event loop only."""

    start_timeout_s: float
    request_timeout_s: float
    max_tokens: int  # of prompt and response together: every engine must support it
    vocabulary: int
    transport: Transport = Transport.file
    init_info: dict[str, Any] | None = None  # arguments of the engines before the first update
    # policy versions so far, the current one last
    served: list[int] = field(default_factory=lambda: [NO_VERSION])
    # the update that brought its weights, for re-syncs
    kept_update: list[UpdateCall] = field(default_factory=list)
    restarted: int = 0  # restarts of all engines so far
    dispatchers: list[Dispatcher] = field(default_factory=list)  # those that are open
    # one update or re-sync at a time
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)
    # the learner has the engines' GPUs: a dead engine is restarted afterwards
    asleep: bool = False

    @property
    def version(self) -> int:
        return self.served[-1]

    def init_of(self, replica: Replica) -> dict[str, Any]:
        """Return the rendezvous arguments of an engine; vLLM's trainer tells every engine that its
        workers come first.
        """
        info = dict(self.init_info or {})
        if "rank_offset" in info:
            info["rank_offset"] += replica.workers_before
        return {"init_info": info}

    def publish(self) -> None:
        """Notify dispatchers that an engine came back, was abandoned, or was updated."""
        for dispatcher in self.dispatchers:
            dispatcher.notify()

    def mark_down(self, replica: Replica, reason: str) -> None:
        reason = reason.removeprefix(f"{replica.name}: ")
        if replica.ready:
            log.warning(f"{replica.name} is unavailable: {reason}")
        replica.mark_down(reason)
        self.publish()


class Supervisor:
    """Supervisor task of one engine."""

    def __init__(
        self,
        replica: Replica,
        start: ProcessSettings | None,
        state: SamplerState,
        address: str,
        key: str,
    ) -> None:
        """`start`: how to start this engine; None if it was given by address."""
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
        """Supervise the engine until cancelled, or until it is not restarted again."""
        replica = self.replica
        while True:
            while self._state.asleep and self._start is not None:
                await asyncio.sleep(POLL_S)
            try:
                await self._bring_up()
            except WeightSyncError as error:
                log.info(
                    f"{replica.name} refuses policy version {self._state.version} as it is kept "
                    f"({error}). This takes one of its {MAX_RESTARTS} restarts, and so does each "
                    "further try before the next version"
                )
                await self._failed(f"the re-sync was refused: {error}")
            except Exception as error:  # any exception: the supervisor must not end silently
                await self._failed(
                    str(error)
                    if isinstance(error, SamplerError)
                    else f"{type(error).__name__}: {error}"
                )
            else:
                await self._watch()
            if replica.failed:
                self._state.publish()
                return

    async def close(self, shut: bool = False) -> None:
        """Close the connection. `shut`: end workers in order, as those of a larger engine share
        memory that only they release.
        """
        child = self._child
        process = self.replica.process
        if shut and child is not None and process is not None and process.settings.workers > 1:
            child.ask_to_end()
            await asyncio.to_thread(process.wait, END_GRACE_S)
        await self.replica.engine.close()

    async def _bring_up(self) -> None:
        """Bring an engine, restarted here or given by address, to the current policy."""
        replica = self.replica
        state = self._state
        again = self.first_start.done()
        if replica.process is None and self._start is not None:
            state.restarted += 1
            self.start_process()
            count = f"{replica.restarts} of {MAX_RESTARTS} restarts"
            log.info(f"{replica.name} starts again ({count}): {replica.reason}")
        if self._child is not None and replica.process is not None:
            await self._child.open()
            await self._child.start(replica.process.settings.arguments, state.start_timeout_s)
            await asyncio.to_thread(replica.process.note_shared_memory)
        elif self._start is None:
            await self._connect()
        await self._unless_down(self._make_current())
        if again:
            log.info(f"{replica.name} is back with policy version {replica.version}")
        state.publish()

    async def _connect(self) -> None:
        replica = self.replica
        await replica.engine.close()
        line = PortLine(self._address, self._key)
        client = replica.engine = self._client(line)
        await self._until_healthy()
        if self._key and await line.answers_without_key():
            raise EngineUnavailable(
                f"{self._address} accepts weight updates without the key; start it with "
                "`megatron-rl serve`"
            )
        await client.open()
        longest = (await client.status()).get("longest", 0)
        if longest < self._state.max_tokens:
            raise EngineUnavailable(
                f"{self._address} takes {longest} tokens, the recipe needs "
                f"{self._state.max_tokens}: start it with rollout.max_prompt_tokens and "
                "rollout.max_response_tokens of this recipe"
            )

    async def _make_current(self) -> None:
        replica = self.replica
        state = self._state
        if self._start is None:  # its previous client may have left in the middle of an update
            await replica.engine.update("forget")
        if state.init_info is not None:
            await replica.engine.update("init", **state.init_of(replica))
        replica.cache_tokens = (await replica.engine.status()).get("cache_tokens", 0)
        replica.come_up()
        if not self.first_start.done():
            self.first_start.set_result(None)
        async with state.updating:
            if not replica.up:
                raise EngineUnavailable(replica.reason)
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
                raise EngineUnavailable(
                    f"no reply from {self._address} in {limit}; the last try: {look.slow}"
                )
            await asyncio.sleep(POLL_S)

    async def _unless_down(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work on the engine while checking its health."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._until_down())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineUnavailable(watching.result())
            working.result()
        finally:
            working.cancel()
            watching.cancel()

    async def _watch(self) -> None:
        """Return once the engine has terminated, or was marked down by another task."""
        reason = await self._until_down(lambda: not self.replica.up)
        self._state.mark_down(self.replica, reason)
        await self._failed(reason)

    async def _until_down(self, taken_out: Callable[[], bool] = lambda: False) -> str:
        """Wait for the engine's end and describe it: its process ended, or several health checks
        failed in a row.
        """
        replica = self.replica
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
                return f"failed {UNANSWERED} health checks in a row: {look.slow}"
            if slow >= SLOW and not look.slow:
                log.info(f"{replica.name} replies again")
            slow = slow + 1 if look.slow else 0
            if slow == SLOW:
                log.info(f"{replica.name} is slow to reply: {look.slow}")
        return replica.reason

    async def _failed(self, reason: str) -> None:
        """Clean up after a failure; decide whether to restart."""
        replica = self.replica
        state = self._state
        process = replica.process
        # its sockets end just before it does; by now the exit status may be known
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
            log.info(
                f"{replica.name} is not restarted again after {MAX_RESTARTS} restarts: {reason}"
            )
        else:
            replica.restarts += 1
