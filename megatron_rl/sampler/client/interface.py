"""Interface of any engine (generate, update, sleep, values, status), however reached; its errors.

One completion is one sample, with a seed of its own: whoever wants several of a prompt asks for
each. Everything here is asynchronous, and used from one event loop. `EngineClient`
(engine_client.py) reaches vLLM; docs/architecture.md says how to add another engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_rl.types import Completion, SamplingParams

Part = Literal["weights", "kv_cache"]
Kind = Literal["activations", "routed_experts"]
UpdateStep = Literal["init", "start", "stage", "await", "finish", "resume", "abort", "forget"]


class SamplerError(RuntimeError):
    """The engine did not start, died, or did not answer in time."""

    process = "the sampler's engine"
    hint = (
        "Read the end of its log. Where the cache is too small, raise "
        "sampler.vllm.gpu_memory_utilization (on CPUs sampler.vllm.kv_cache_memory_bytes) or lower "
        "rollout.max_response_tokens; where others need the memory, lower it. "
        "sampler.start_timeout_s and sampler.request_timeout_s give a slow machine more time."
    )


class EngineGone(SamplerError):
    """The engine is unreachable, hangs, or broke down; another one may do better."""


class NoAnswer(EngineGone):
    """The engine did not answer in time."""


class RequestRefused(SamplerError):
    """The engine says that the request is wrong: no other one would take it."""


@dataclass(frozen=True)
class Look:
    """Result of a look at an engine."""

    alive: bool
    slow: str = ""  # why it does not answer at once


def read_health(status: int, told: Mapping[str, str]) -> Look:
    """Read what a heartbeat has told."""
    if status != 200:
        return Look(False, (told.get("error") or f"its status is {status}")[:200])
    engine = told.get("engine", "")
    return Look(True, "" if engine == "answers" else f"its engine is {engine:.100}")


class Engine(Protocol):
    """Every call may raise EngineGone; SamplerError where the engine itself has refused it."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        version: int,
        patient: bool,
    ) -> Completion:
        """Draw one sample; cancelled, the engine gives it up.

        `version`: the policy that the caller believes is served. `patient`: a newer one is as good,
        and what cannot be answered now waits until a sync or a wake has changed that.
        """
        ...

    async def update(self, step: UpdateStep, **arguments: Any) -> Mapping[str, Any]:
        """A step of a weight update. WeightSyncError: the version is refused, and the one
        before serves on.

        `start`, `stage` (`update_info`: described to vLLM's API; once or several times), `await`
        (until it is checked), `finish` (`stand`; what it cost), and `resume` where
        open samples were to stand still.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Give device memory back: the cache, and the weights (1: kept on the host, 2: gone until
        the next sync).
        """
        ...

    async def wake(self, parts: Sequence[Part] | None = None) -> None: ...

    async def values(
        self, kind: Kind, sequences: Sequence[Sequence[int]], version: int
    ) -> list[Any]:
        """Outputs of the engine's modules for sequences, for diagnosis."""
        ...

    async def status(self) -> Mapping[str, Any]: ...

    async def look(self) -> Look:
        """Look whether it answers, or at least works."""
        ...

    async def close(self) -> None: ...
