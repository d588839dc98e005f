"""What the loop asks of a sampler, whichever engine answers: embedded or a fleet of servers.

The four weight methods are those of vLLM's `VLLMWeightSyncClient`, so that vLLM's own trainer-side transports
drive a sampler too.

An engine that shares a GPU with the learner sleeps from its start to the first sync, so that it starts alone, and from
the last answer of a step to the next sync. Order at a sync: wake weights, sync, wake cache. The cache's memory is free
while the update is staged, and nothing can be asked of the engine before the new version is complete.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from megatron_rl.config.schema import Sleep
from megatron_rl.engine.readiness import CACHE, WEIGHTS
from megatron_rl.types import Prompt, Rollout, SamplingParams
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

if TYPE_CHECKING:
    import torch

MAX_RESTARTS = 3  # of an engine, or of each server: one that goes on dying is ill
NOT_RUNNING = "the sampler is not running: it was never started, was closed, or failed before"
SLEEP_LEVELS = {Sleep.offload: 1, Sleep.discard: 2}  # vLLM's


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
        """Ask more prompts, behind those before; the group of a prompt is `first_group` plus its index."""
        ...

    def finished(self) -> list[list[Rollout]]:
        """Return the groups that are complete by now, each by sample; wait for one. Empty: nothing is open any more."""
        ...

    def close(self) -> None:
        """Give up what is open."""
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
        """Answer prompts group by group."""
        ...

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """What the engine's modules put out for this sequence, by point (models/points.py)."""
        ...

    def routed_experts(self, sequences: Sequence[Sequence[int]]) -> list[bytes]:
        """[tokens, layers, experts of a token] as int32, -1 in layers without; empty where it cannot be told."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Hold this around an update, its files' writing included: an embedded engine that dies comes back by it."""
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


class BaseSampler(ABC):
    """What both samplers do alike. `note` of either receives a line whenever an engine, or a server, goes or comes."""

    def __init__(self) -> None:
        self.policy_version = NO_VERSION
        self.last_sync: dict[str, Any] = {}

    @abstractmethod
    def launch(self) -> None: ...

    @abstractmethod
    def wait_ready(self) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Stop the engines; safe to call twice and in any state."""

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self, sync: dict[str, Any], weight_version: str | None, owner: str) -> None:
        """Note an update that is complete."""
        self.last_sync, self.policy_version = sync, sync["policy_version"]
        if weight_version is not None and weight_version != str(self.policy_version):
            raise WeightSyncError(f"the {owner} loaded policy version {self.policy_version}, not {weight_version}")


class Sleeper(Protocol):
    """The two calls of a sampler that its sleep needs."""

    def sleep(self, level: int = 1) -> None: ...

    def wake(self, tags: list[str] | None = None) -> None: ...


class SleepSchedule:
    """When an engine that shares a GPU with the learner sleeps; never, where the recipe has no sleep."""

    def __init__(self, sampler: Sleeper, mode: Sleep) -> None:
        self._sampler, self._level = sampler, SLEEP_LEVELS.get(mode)
        self._asleep = False

    def sleep(self) -> None:
        """Put the engine to sleep: once it has started, and after the last request before a sync. See `wake`."""
        if self._level is not None and not self._asleep:
            self._sampler.sleep(self._level)
            self._asleep = True

    def wake(self) -> None:
        """Wake the engine for a request that comes before the next sync does."""
        with self.syncing():
            pass

    @contextmanager
    def syncing(self) -> Iterator[None]:
        """Wake the engine around a sync. A sync that fails leaves the cache asleep: the engine goes on refusing."""
        if self._asleep:
            self._sampler.wake([WEIGHTS])
        yield
        if self._asleep:
            self._sampler.wake([CACHE])
            self._asleep = False


def answer_all(answering: Answering, prompts: Sequence[Prompt], first_group: int) -> list[Rollout]:
    """Ordered by prompt, then sample; nothing stays open, whatever happens."""
    try:
        answering.add(prompts, first_group)
        groups: list[list[Rollout]] = []
        while more := answering.finished():
            groups += more
    finally:
        answering.close()
    return [rollout for group in sorted(groups, key=lambda group: group[0].group) for rollout in group]


def versions_of_tokens(spans: Sequence[Sequence[int]]) -> array[int]:
    """Policy version of each token; a span is a version and a number of tokens."""
    versions = array("i")
    for version, tokens in spans:
        versions.extend(array("i", [version]) * tokens)
    return versions


def request_seed(seed: int, group: int) -> int:
    """A seed per group, the same for the same run seed; vLLM derives one per sample from it."""
    digest = blake2b(f"{seed}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # leaves room to count samples upwards in 63 bits
