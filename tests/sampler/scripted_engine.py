"""Scripted engine: responds from a table, serves versions, and can be set to die, hang, refuse
or return false values.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.config.schema import Format
from megatron_rl.engine.readiness import SyncState
from megatron_rl.sampler.client.interface import (
    EngineUnavailable,
    Kind,
    Look,
    Part,
    RequestRefused,
    SamplerError,
    UpdateStep,
)
from megatron_rl.sampler.replica import Replica, State
from megatron_rl.types import Completion, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

HANG_S = 240.0


@dataclass(eq=False)
class ScriptedEngine:
    """See sampler.engine.Engine. Without an entry in `table`, an answer is the prompt's last token
    and the seed.
    """

    name: str = "engine"
    version: int = 0
    # tokens and logprobs
    table: Mapping[tuple[int, ...], Sequence[tuple[int, float]]] = field(default_factory=dict)
    once: Callable[[], bool] = lambda: True  # no answer before this holds
    pause_s: float = 0.0  # before each response
    hangs: bool = False
    dies_at: int | None = None  # its n-th sample
    refused: tuple[int, ...] = ()  # the prompt of these tokens
    lie: tuple[int, ...] = ()  # reported versions of its tokens
    # None: it never replies
    fails: dict[UpdateStep, Exception | None] = field(default_factory=dict)
    loads_first: bool = False  # a `finish` that fails has loaded the version before
    load_s: float = 0.0
    looks: list[Look] = field(default_factory=list)  # in order; healthy afterwards
    events: list[str] = field(default_factory=list)  # may be shared
    incomplete: bool = False
    asked: list[int] = field(default_factory=list)  # seeds
    working: int = 0
    most: int = 0  # samples at once
    staged: int | None = None
    paused: bool = False
    received: dict[UpdateStep, dict[str, Any]] = field(default_factory=dict)

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        version: int,
        patient: bool,
    ) -> Completion:
        if self.version != version and not patient:
            raise SamplerError(f"{self.name} serves policy version {self.version}")
        self.asked.append(seed)
        dies = self.dies_at is not None and len(self.asked) >= self.dies_at
        self.working += 1
        self.most = max(self.most, self.working)
        began = self.version
        try:
            await asyncio.sleep(HANG_S if self.hangs else self.pause_s)
            await until(self.once)
        finally:
            self.working -= 1
        if dies:
            raise EngineUnavailable(f"{self.name}: killed")
        if tuple(tokens) == self.refused:
            raise RequestRefused(f"{self.name} refused: {tokens[0]} is beyond the vocabulary")
        drawn = self.table.get(tuple(tokens), [(tokens[-1], -1.0), (seed, -2.0)])
        # an update comes after the first token
        versions = self.lie or (began, *[self.version] * (len(drawn) - 1))
        ids, logprobs = zip(*drawn, strict=True)
        return Completion(
            token_ids=ids,
            logprobs=logprobs,
            finish_reason="stop",
            policy_version=versions[0],
            versions=versions if len(set(versions)) > 1 else None,
        )

    async def update(self, step: UpdateStep, **arguments: Any) -> Mapping[str, Any]:
        if step in self.fails and not (step == "finish" and self.loads_first):
            await self._fail(step)
        self.events.append(f"{self.name}: {step}")
        self.received[step] = arguments
        if step in ("start", "abort", "forget"):
            self.staged = None
            self.paused = False
        if step == "forget":
            self.version = NO_VERSION
        elif step == "stage":
            self.staged = arguments["update_info"]["policy_version"]
        elif step == "resume":
            self.paused = False
        elif step == "finish":
            await asyncio.sleep(self.load_s)
            if self.staged is None:
                raise WeightSyncError(
                    f"{self.name}: finish_weight_update without an accepted update_weights"
                )
            self.version = self.staged
            self.staged = None
            self.paused = arguments.get("pause", False)
            if step in self.fails:
                await self._fail(step)
            return asdict(SyncState(self.version, False, 0.0, self.load_s, 1))
        return {}

    async def _fail(self, step: UpdateStep) -> None:
        failure = self.fails[step]
        if failure is None:
            await asyncio.sleep(HANG_S)
        else:
            raise failure

    async def sleep(self, level: int) -> None:
        self.events.append(f"{self.name}: sleeps at level {level}")

    async def wake(self, parts: Sequence[Part] | None = None) -> None:
        self.events.append(f"{self.name}: wakes")

    async def values(
        self, kind: Kind, sequences: Sequence[Sequence[int]], version: int
    ) -> list[Any]:
        return [b""] * len(sequences)

    async def status(self) -> Mapping[str, Any]:
        return {
            "policy_version": self.version,
            "incomplete": self.incomplete,
            "refusal": None,
            "longest": 48,
            "cache_tokens": 20,
        }

    async def look(self) -> Look:
        return self.looks.pop(0) if self.looks else Look(True)

    async def close(self) -> None:
        self.events.append(f"{self.name}: closed")


def replica(name: str = "a", ready: bool = True, version: int = 0, **script: Any) -> Replica:
    return Replica(
        name,
        Format.none,
        ScriptedEngine(name, version, **script),
        version=version,
        state=State.ready if ready else State.down,
    )


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not happened():
            await asyncio.sleep(0.001)
