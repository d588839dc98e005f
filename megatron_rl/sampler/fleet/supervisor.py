"""Keeps the fleet's servers alive: starts them, looks at them, restarts and re-syncs the ones that died.

One task per server, on the fleet's event loop. A server serves only after it has received the fleet's current
policy version. A server that was given by address is not restarted, only looked for until it answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import Cache, Format
from megatron_rl.processes.pulse import own
from megatron_rl.sampler.fleet.dispatch import Dispatcher
from megatron_rl.sampler.fleet.replica import Replica, ReplicaGone, Swap
from megatron_rl.sampler.fleet.server_process import ServerProcess, ServerSettings
from megatron_rl.sampler.protocol import MAX_RESTARTS, SamplerError
from megatron_rl.types import SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

POLL_S = 0.2
PROBE_EVERY_S = 2.0  # between two looks at every server
SLOW = 2  # looks in a row without an answer of the engine until somebody is told
UNANSWERED = 3  # looks in a row without an answer until a server counts as gone
WARM_UP = SamplingParams(samples=2, max_tokens=2)


@dataclass
class FleetState:
    """What the supervisors and the sampler share; touched on the event loop only."""

    start_timeout_s: float
    max_tokens: int  # of a prompt and its answer together: what every server must take
    note: Callable[[str], None]
    swap: Swap = field(default_factory=Swap)
    served: list[int] = field(default_factory=lambda: [NO_VERSION])  # policy versions so far, the current one last
    kept_update: Mapping[Format, Mapping[str, Any]] = field(default_factory=dict)  # its weights, for re-syncs
    restarted: int = 0  # servers, so far
    dispatchers: list[Dispatcher] = field(default_factory=list)  # those that are open
    updating: asyncio.Lock = field(default_factory=asyncio.Lock)  # one update of the fleet, or one re-sync, at a time

    @property
    def version(self) -> int:
        return self.served[-1]

    def tell(self) -> None:
        """Tell dispatchers that a replica came back, was given up, or has been updated."""
        for dispatcher in self.dispatchers:
            dispatcher.changed.set()

    def take_out(self, replica: Replica, reason: str) -> None:
        if replica.ready:
            self.note(f"{replica.name} is out: {reason}")
        replica.take_out(reason)
        self.tell()


class Supervisor:
    """The life of one server."""

    def __init__(self, replica: Replica, own: ServerSettings | None, state: FleetState) -> None:
        """`own`: how the run starts this server; None where it was given by address."""
        self.replica = replica
        self._own, self._state = own, state
        self.first_start: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start_process(self) -> None:
        if self._own is not None:
            self.replica.process = ServerProcess(self._own, self.replica.key)
            self.replica.address = self.replica.process.address
            own(self.replica.name, self.replica.process)

    async def run(self) -> None:
        """Look after the server until cancelled, or until the server is given up."""
        replica = self.replica
        while True:
            try:
                await self._bring_up()
            except WeightSyncError as error:
                self._state.note(
                    f"{replica.name} refuses policy version {self._state.version} as it is kept ({error}). This takes "
                    f"one of its {MAX_RESTARTS} restarts, and so does each further try before the next version"
                )
                await self._failed(f"the re-sync was refused: {error}")
            except Exception as error:  # every kind: a server without its supervisor would be lost in silence
                await self._failed(
                    str(error) if isinstance(error, SamplerError) else f"{type(error).__name__}: {error}"
                )
            else:
                if not self.first_start.done():
                    self.first_start.set_result(None)
                await self._watch()
            if replica.given_up:
                self._state.tell()
                return

    async def _bring_up(self) -> None:
        """Bring a replica, restarted here or given by address, to serve the current policy."""
        replica, state = self.replica, self._state
        await replica.close()
        if replica.process is None and self._own is not None:
            state.restarted += 1
            self.start_process()
            count = f"{replica.restarts} of {MAX_RESTARTS} restarts"
            state.note(f"{replica.name} starts again ({count}): {replica.reason}")
        await self._until_healthy()
        if self._own is None:
            await self._check_given()
        await self._unless_gone(self._make_current())
        if self.first_start.done():
            state.note(f"{replica.name} is back with policy version {replica.version}")
        state.tell()

    async def _make_current(self) -> None:
        replica, state = self.replica, self._state
        if self._own is None:  # whoever used it before may have left in the middle of an update
            await replica.resume()
        await replica.forget_version()
        await replica.generate((0,), 0, WARM_UP)  # the first generation loads and compiles for seconds
        if replica.process is not None:
            await asyncio.to_thread(replica.process.note_shared_memory)
        async with state.updating:
            if state.kept_update:
                await replica.call_workers("init_weight_transfer_engine", init_info={})
                await replica.start_update()
                await replica.stage_update(state.kept_update[replica.format])
                await replica.finish_update(state.swap)
            replica.ready, replica.reason = True, ""

    async def _until_healthy(self) -> None:
        replica, state = self.replica, self._state
        deadline = time.monotonic() + state.start_timeout_s
        while not (await replica.look()).alive:
            ended = replica.process.ended() if replica.process else None
            if ended:
                raise ReplicaGone(ended)
            if time.monotonic() > deadline:
                raise ReplicaGone(
                    f"no answer from {replica.address} in sampler.start_timeout_s={state.start_timeout_s:g}"
                )
            await asyncio.sleep(POLL_S)

    async def _check_given(self) -> None:
        """A server that was started elsewhere: does it ask for the key, and does it sample as ours do?"""
        replica = self.replica
        if replica.key and await replica.answers_without_key():
            raise ReplicaGone(
                f"{replica.address} moves weights for whoever asks, without the key; start it with `megatron-rl serve`"
            )
        config = (await replica.get("/server_info?config_format=json"))["vllm_config"]
        info, swap = config["model_config"], self._state.swap
        if info["logprobs_mode"] != "processed_logprobs":
            raise ReplicaGone(
                f"{replica.address} reports {info['logprobs_mode']}: start it with --logprobs-mode processed_logprobs"
            )
        if info["max_model_len"] < self._state.max_tokens:
            raise ReplicaGone(
                f"{replica.address} takes {info['max_model_len']} tokens, the recipe needs {self._state.max_tokens}: "
                f"start it with --max-model-len {self._state.max_tokens}"
            )
        if swap.cache == Cache.keep and config["cache_config"]["enable_prefix_caching"]:
            raise ReplicaGone(
                f"{replica.address} caches prefixes, which old weights could outlive under rollout.in_flight_cache="
                "keep: start it with --no-enable-prefix-caching, or use in_flight_cache: rebuild"
            )

    async def _unless_gone(self, work: Coroutine[Any, Any, None]) -> None:
        """Do some work with the server, and look at the server meanwhile."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self._until_gone())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ReplicaGone(watching.result())
            working.result()
        finally:
            working.cancel()
            watching.cancel()

    async def _watch(self) -> None:
        """Returns once the server is gone, or was taken out by whoever asked it something."""
        replica = self.replica
        reason = await self._until_gone(lambda: not replica.ready)
        self._state.take_out(replica, reason)
        await self._failed(reason)

    async def _until_gone(self, taken_out: Callable[[], bool] = lambda: False) -> str:
        """Wait for the server's end and say what it was: its process ended, or it left several looks unanswered."""
        replica, state = self.replica, self._state
        slow, unanswered, next_look = 0, 0, time.monotonic() + PROBE_EVERY_S
        while not taken_out():
            await asyncio.sleep(min(POLL_S, PROBE_EVERY_S))
            ended = replica.process.ended() if replica.process else None
            if ended:
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
        replica, state = self.replica, self._state
        replica.take_out(reason)
        details = reason
        if replica.process is not None:
            details = f"{reason}. The end of {replica.process.settings.log_path}:\n{replica.process.log_end()}"
            await asyncio.to_thread(replica.process.end)
            replica.process = None
        if not self.first_start.done():
            replica.given_up = details
            self.first_start.set_exception(SamplerError(f"{replica.name} did not start: {details}"))
        elif self._own is None:
            await asyncio.sleep(PROBE_EVERY_S)
        elif replica.restarts >= MAX_RESTARTS:
            replica.given_up = f"given up after {MAX_RESTARTS} restarts: {details}"
            state.note(f"{replica.name} is given up after {MAX_RESTARTS} restarts: {reason}")
        else:
            replica.restarts += 1
