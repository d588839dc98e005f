"""Engine as the sampler sees it: state and allowed transitions (`NEXT`), format, version, load; the
error if no engine is left.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema import Format
from megatron_rl.processes.health import EngineHealth
from megatron_rl.processes.threads import tracked
from megatron_rl.sampler.client.engine_process import EngineProcess
from megatron_rl.sampler.client.interface import (
    Engine,
    EngineTimeout,
    Look,
    SamplerError,
    read_health,
)
from megatron_rl.weight_sync.manifest import NO_VERSION


class State(Enum):
    down = "is starting, or not yet reachable"
    behind = "is up, without the current weights"
    ready = "takes prompts"
    updating = "accepts no prompts: new weights are being loaded"
    failed = "is not restarted again"


NEXT: dict[State, frozenset[State]] = {
    State.down: frozenset({State.behind, State.failed}),
    State.behind: frozenset({State.ready, State.down}),
    State.ready: frozenset({State.updating, State.down}),
    State.updating: frozenset({State.ready, State.down}),
    State.failed: frozenset(),
}


@dataclass(eq=False)
class Replica:
    """Engine of the sampler. Used from the sampler's event loop only."""

    name: str
    format: Format
    engine: Engine
    workers_before: int = 0  # workers of other engines before this one's, in a group of all workers
    process: EngineProcess | None = None  # None: given by address
    health: EngineHealth | None = None  # of that process
    state: State = State.down
    version: int = NO_VERSION  # of its weights
    reason: str = ""  # why it is down, or not restarted
    restarts: int = 0
    cache_tokens: int = 0  # of all sequences together; 0: unknown
    load: int = 0  # sequences in progress
    served: int = 0  # sequences finished
    # open requests, cancelled when it is marked down
    running: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def up(self) -> bool:
        """True if the engine is up, with any weights."""
        return self.state in (State.behind, State.ready, State.updating)

    @property
    def ready(self) -> bool:
        """True if it holds the weights of `version`, and accepts requests."""
        return self.state in (State.ready, State.updating)

    @property
    def failed(self) -> bool:
        return self.state is State.failed

    def come_up(self) -> None:
        """Mark the engine as up: updates include it from now on."""
        self._become(State.behind)

    def hold(self, version: int) -> None:
        """Record the loaded version; the engine accepts prompts unless an update is in progress."""
        self.version = version
        self.reason = ""
        if self.state is State.behind:
            self._become(State.ready)

    def begin_update(self) -> None:
        if self.state is State.ready:
            self._become(State.updating)

    def end_update(self) -> None:
        if self.state is State.updating:
            self._become(State.ready)

    def mark_down(self, reason: str) -> None:
        """Mark the engine as unavailable and cancel its requests, for others to take over."""
        if self.up:
            self._become(State.down)
        if not self.failed:
            self.reason = reason
        self.version = NO_VERSION
        for task in self.running - {asyncio.current_task()}:
            task.cancel()

    def give_up(self, reason: str) -> None:
        self._become(State.failed)
        self.reason = reason

    def _become(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise AssertionError(f"{self.name}: {self.state.name} -> {state.name}")
        self.state = state

    async def wait_for(self, asked: Awaitable[Any]) -> Any:
        """Wait for a reply; EngineTimeout if its supervisor marks it down meanwhile."""
        return await tracked(asked, self.running, lambda: EngineTimeout(self.reason))

    async def look(self) -> Look:
        """Check whether the engine replies, or at least makes progress."""
        if self.health is not None:
            return read_health(*await self.health.look())
        try:
            return await self.engine.look()
        except SamplerError as error:
            return Look(False, str(error))


class NoServerLeft(SamplerError):
    """No engine is left; the message has the reason of each."""

    def __init__(self, replicas: Sequence[Replica], version: int, patience_s: float) -> None:
        reasons = []
        logs = ""  # appended to the hint
        for one in replicas:
            first, _, log = (one.reason or "not ready").partition("\n")
            reasons.append(f"{one.name}: {first.rstrip(':')}")
            if log:
                logs += f"\n{one.name}:\n{log}"
        super().__init__(
            f"no engine serves policy version {version} "
            f"(sampler.start_timeout_s={patience_s:g}). {'; '.join(reasons)}. Read the engines' "
            "logs; lower sampler.vllm.max_num_seqs if memory ran out, raise "
            "sampler.start_timeout_s on a slow machine, restart servers of sampler.addresses, and "
            f"resume the run{logs}"
        )
