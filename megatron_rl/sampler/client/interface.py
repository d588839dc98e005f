"""Interface of any engine (generate, update, sleep, values, status) and its errors.

One completion is one sample with its own seed: several samples of a prompt are several requests.
Everything here is asynchronous, and used from one event loop. `EngineClient` (engine_client.py)
reaches vLLM; docs/concepts/architecture.md says how to add another engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_rl.types import Completion, SamplingParams

Part = Literal["weights", "kv_cache"]
Kind = Literal["activations", "routed_experts"]
UpdateStep = Literal["init", "start", "stage", "await", "finish", "resume", "abort", "forget"]


class SamplerError(RuntimeError):
    """The engine did not start, died, or did not reply in time."""

    process = "the sampler's engine"
    hint = (
        "Read the end of its log. Where the cache is too small, raise "
        "sampler.vllm.gpu_memory_utilization (on CPUs sampler.vllm.kv_cache_memory_bytes) or lower "
        "rollout.max_response_tokens; where others need the memory, lower it. "
        "sampler.start_timeout_s and sampler.request_timeout_s give a slow machine more time."
    )


class EngineUnavailable(SamplerError):
    """The engine is unreachable, hangs, or broke down; another one may do better."""


class EngineTimeout(EngineUnavailable):
    """The engine did not reply in time."""


class RequestRefused(SamplerError):
    """The engine refused a malformed request: any other engine would, too."""


@dataclass(frozen=True)
class Look:
    """Result of a health check of an engine."""

    alive: bool
    slow: str = ""  # why it does not reply at once


def read_health(status: int, reply: Mapping[str, str]) -> Look:
    """Read the reply to a health check."""
    if status != 200:
        return Look(False, (reply.get("error") or f"its status is {status}")[:200])
    engine = reply.get("engine", "")
    return Look(True, "" if engine == "answers" else f"its engine is {engine:.100}")


class Engine(Protocol):
    """Client of an engine. Any call may raise EngineUnavailable, or SamplerError if the engine refuses
    it.
    """

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        *,
        version: int,
        patient: bool,
    ) -> Completion:
        """Draw one sample; cancellation cancels it at the engine, too.

        `version`: the policy that the caller expects. `patient`: a newer one is accepted, and a
        request that cannot be served now waits until the next sync or wake.
        """
        ...

    async def update(self, step: UpdateStep, **arguments: Any) -> Mapping[str, Any]:
        """Run one step of a weight update. WeightSyncError: the version is refused, and the
        previous one is still served.

        `start`, `stage` (`update_info`: vLLM's description; once or several times), `await` (until
        it is verified), `finish` (`pause`; returns its cost), and `resume` if open samples were
        paused.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Release device memory: the cache, and the weights (1: kept in CPU memory, 2: dropped
        until the next sync).
        """
        ...

    async def wake(self, parts: Sequence[Part] | None = None) -> None: ...

    async def values(
        self, kind: Kind, sequences: Sequence[Sequence[int]], version: int
    ) -> list[Any]:
        """Return outputs of the engine's modules for sequences, for diagnosis."""
        ...

    async def status(self) -> Mapping[str, Any]: ...

    async def look(self) -> Look:
        """Check whether the engine replies, or at least makes progress."""
        ...

    async def close(self) -> None: ...
