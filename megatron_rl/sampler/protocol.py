"""What the loop asks of a sampler, whichever engine answers: embedded or a fleet of servers.

The four weight methods are those of vLLM's `VLLMWeightSyncClient`, so that vLLM's own trainer-side transports
drive a sampler too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.types import Prompt, Rollout, SamplingParams

if TYPE_CHECKING:
    import torch

MAX_RESTARTS = 3  # of an engine, or of each server: one that goes on dying is ill


class SamplerError(RuntimeError):
    """The engine did not start, died, or did not answer in time."""


@dataclass(frozen=True)
class SamplerStats:
    """Totals since `start`."""

    tokens: int = 0
    seconds: float = 0.0  # in which something was open
    retried: int = 0  # prompts that another server had to answer
    restarts: int = 0  # of engines and servers


class Answering(Protocol):
    """Prompts that are being answered, for one thread; others may ask the sampler for other things meanwhile."""

    def add(self, prompts: Sequence[Prompt], first_group: int) -> None:
        """More of them, behind those before; the group of a prompt is `first_group` plus its index."""
        ...

    def finished(self) -> list[list[Rollout]]:
        """Whole groups that are complete by now, each by sample; waits for one. Empty: nothing is open any more."""
        ...

    def close(self) -> None:
        """Gives up what is open."""
        ...


class Sampler(Protocol):
    policy_version: int  # -1: dummy weights, nothing synced yet
    last_sync: dict[str, Any]  # verify_s, load_s and bytes of the last accepted update; of the slowest server

    @property
    def stats(self) -> SamplerStats: ...

    def start(self) -> None: ...

    def launch(self) -> None:
        """Start without waiting; whatever comes next waits."""
        ...

    def wait_ready(self) -> None: ...

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, *, seed: int, first_group: int, step: int
    ) -> list[Rollout]:
        """Ordered by prompt, then sample; the group of a prompt is `first_group` plus its index."""
        ...

    def answering(self, params: SamplingParams, *, seed: int, step: int = 0) -> Answering:
        """The same, group by group."""
        ...

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the engine's modules put out for this sequence, by point (models/points.py)."""
        ...

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        """[tokens, layers, experts of a token] as int32, -1 in layers without; empty where it cannot be told."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Around an update, its files' writing included: an engine of this process that dies comes back by it."""
        ...

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None:
        """Verify an update; a refused one raises WeightSyncError and leaves the served version as it is."""
        ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...

    def sleep(self, level: int = 1) -> None:
        """Give device memory back: the cache, and the weights (1: kept on the host, 2: gone until the next sync)."""
        ...

    def wake(self, tags: list[str] | None = None) -> None:
        """Take memory back for `weights`, `kv_cache`, or both; a request in between is refused."""
        ...

    def health(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def request_seed(seed: int, group: int) -> int:
    """A seed per group, the same for the same run seed; vLLM derives one per sample from it."""
    digest = blake2b(f"{seed}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # leaves room to count samples upwards in 63 bits
