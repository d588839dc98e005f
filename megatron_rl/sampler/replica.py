"""Engine as the sampler keeps it: its state and the transitions allowed (`NEXT`), format, version,
load; and the error if no engine is left.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from megatron_rl.config.schema import Format
from megatron_rl.processes.health import EngineHealth
from megatron_rl.sampler.client.engine_process import EngineProcess
from megatron_rl.sampler.client.interface import Engine, Look, NoAnswer, SamplerError, read_health
from megatron_rl.weight_sync.manifest import NO_VERSION


class State(Enum):
    down = "starts, or is looked for"
    behind = "is up, without the weights that are served"
    ready = "takes prompts"
    updating = "takes no prompts: new weights are about to be, or just became, the live ones"
    given_up = "does not come back"


NEXT: dict[State, frozenset[State]] = {
    State.down: frozenset({State.behind, State.given_up}),
    State.behind: frozenset({State.ready, State.down}),
    State.ready: frozenset({State.updating, State.down}),
    State.updating: frozenset({State.ready, State.down}),
    State.given_up: frozenset(),
}


@dataclass(eq=False)
class Replica:
    """Used from the sampler's event loop only."""

    name: str
    format: Format
    engine: Engine
    workers_before: int = 0  # of other engines, in a group of the workers of all
    process: EngineProcess | None = None  # None: it was given by address
    health: EngineHealth | None = None  # of that process
    state: State = State.down
    version: int = NO_VERSION  # of its weights
    reason: str = ""  # why it is down, or given up
    restarts: int = 0
    cache_tokens: int = 0  # of all sequences at once; 0: not known
    load: int = 0  # sequences it works on
    served: int = 0  # sequences it has answered
    # what has been asked of it, to be cancelled with it
    running: set[asyncio.Future[Any]] = field(default_factory=set)

    @property
    def up(self) -> bool:
        """True if there is an engine, whatever weights it holds."""
        return self.state in (State.behind, State.ready, State.updating)

    @property
    def ready(self) -> bool:
        """True if it holds the weights of `version`, and answers."""
        return self.state in (State.ready, State.updating)

    @property
    def given_up(self) -> bool:
        return self.state is State.given_up

    def come_up(self) -> None:
        """There is an engine, which an update may reach from now on."""
        self._become(State.behind)

    def hold(self, version: int) -> None:
        """The engine has loaded this version; it takes prompts unless an update is under way."""
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
        """Send no more requests to it; whatever it works on is cancelled, for others to take over."""
        if self.up:
            self._become(State.down)
        if not self.given_up:
            self.reason = reason
        self.version = NO_VERSION
        for task in self.running - {asyncio.current_task()}:
            task.cancel()

    def give_up(self, reason: str) -> None:
        self._become(State.given_up)
        self.reason = reason

    def _become(self, state: State) -> None:
        if state not in NEXT[self.state]:
            raise AssertionError(f"{self.name}: {self.state.name} -> {state.name}")
        self.state = state

    async def wait_for(self, asked: Awaitable[Any]) -> Any:
        """Wait for its reply; ends with NoAnswer if its supervisor takes it out meanwhile."""
        task = asyncio.ensure_future(asked)
        self.running.add(task)
        try:
            await asyncio.wait([task])
        finally:
            self.running.discard(task)
            task.cancel()  # where the caller was
        if task.cancelled():
            raise NoAnswer(self.reason)
        return task.result()

    async def look(self) -> Look:
        """Look whether the engine answers, or at least works."""
        if self.health is not None:
            return read_health(*await self.health.look())
        try:
            return await self.engine.look()
        except SamplerError as error:
            return Look(False, str(error))


class NoServerLeft(SamplerError):
    """Error with the reason of every engine."""

    def __init__(self, replicas: Sequence[Replica], version: int, patience_s: float) -> None:
        reasons = []
        logs = ""  # behind the advice
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
