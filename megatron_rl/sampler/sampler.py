"""Sampler: prompts in, groups of responses (or conversations' turns) out, from engines started by
the run or given by address; weight updates, sleep.

Engines are children of this process, or servers that are given by address. Requests, supervision,
restarts and updates run on an event loop in a thread of its own; this module is its interface for
threads that wait. An update becomes the live weights of all engines, or of none.

The four weight methods are those of vLLM's `VLLMWeightSyncClient`, so that vLLM's own trainer-side
transports drive a sampler too. On a GPU the same code runs with other engine arguments
(engine_settings.py).
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from megatron_rl.config.fleet import uses_servers
from megatron_rl.config.schema import Format
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.points import Kind, Point
from megatron_rl.models.shape import ModelShape
from megatron_rl.processes.heartbeat import waiting
from megatron_rl.processes.threads import EventLoopThread
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.sampler.client.interface import SamplerError
from megatron_rl.sampler.dispatch import Dispatcher, Meter, Request
from megatron_rl.sampler.engine_settings import WORKER_EXTENSION, EngineSettings
from megatron_rl.sampler.generation import GenerationHandle, GenerationSource
from megatron_rl.sampler.replica import Replica
from megatron_rl.sampler.replicas import NOT_RUNNING, Replicas
from megatron_rl.types import Prompt, Rollout, SamplingParams, ToolFormat
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


@dataclass(frozen=True)
class SamplerStats:
    """Totals since `launch`."""

    tokens: int = 0
    seconds: float = 0.0  # with at least one open request
    retried: int = 0  # prompts that had to be moved to another engine
    restarts: int = 0


class Sampler(GenerationSource):
    """Sampler over one or several engines. Any thread may send requests; one at a time may update
    its weights, or close it.
    """

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_dir: Path,
        *,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        self.policy_version = NO_VERSION  # dummy weights: nothing synced yet
        # report of the last accepted update (sampler/update.py)
        self.last_sync: dict[str, Any] = {}
        self._settings = settings
        self._hf_folder = hf_folder
        self._log_dir = log_dir
        self._worker_extension = worker_extension
        self._meter = Meter()
        self._restarts = 0  # before the last launch
        self._loop: EventLoopThread | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._replicas: Replicas | None = None
        self._starting = threading.Lock()
        self._started = False  # True once a caller has waited for the start

    def launch(self) -> None:
        """Start the engines without waiting for them: later calls wait."""
        self.close()
        self._started = False
        self.policy_version = NO_VERSION
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-engine-")
        self._loop = EventLoopThread("sampler", lambda: SamplerError(NOT_RUNNING))
        try:
            vocabulary = ModelShape.from_hf(read_hf_config(self._hf_folder)).vocab
            self._replicas = Replicas(self._settings, vocabulary)
            where = self._hf_folder, Path(self._folder.name), self._log_dir
            self._loop.call(self._replicas.open(*where, self._worker_extension))
        except BaseException:
            self.close()
            raise

    def wait_ready(self) -> None:
        with self._starting:
            if self._started or self._loop is None:
                return
            try:
                self._ask(lambda replicas: replicas.first_starts())
            except BaseException:
                self.close()
                raise
            self._started = True

    def start(self) -> None:
        self.launch()
        self.wait_ready()

    def stream(
        self, params: SamplingParams, *, seed: int, step: int = 0, patient: bool = True
    ) -> GenerationHandle:
        loop, dispatcher = self._dispatcher(patient)

        def answer(prompt: Prompt, group: int) -> Awaitable[list[Rollout]]:
            return dispatcher.ask(Request(group, prompt, request_seed(seed, group), params))

        return GenerationHandle(
            loop,
            answer,
            waiting=self._waiting,
            close=partial(self._give_up, dispatcher),
        )

    def turns(self, params: SamplingParams, *, patient: bool) -> TurnClient:
        """Return a client for the requests of conversations. `patient`: see Engine.generate."""
        loop, dispatcher = self._dispatcher(patient)
        close = partial(self._give_up, dispatcher)
        return TurnClient(loop, dispatcher, replace(params, samples=1), close)

    def _dispatcher(self, patient: bool) -> tuple[EventLoopThread, Dispatcher]:
        self.wait_ready()
        dispatcher = self._ask(lambda replicas: replicas.dispatcher(self._meter, patient))
        assert self._loop is not None
        return self._loop, dispatcher

    def _give_up(self, dispatcher: Dispatcher) -> None:
        with suppress(SamplerError):  # the sampler itself has ended
            self._ask(lambda replicas: replicas.give_up(dispatcher))

    @property
    def stats(self) -> SamplerStats:
        meter = self._meter
        restarts = self._replicas.restarted if self._replicas else 0
        return SamplerStats(meter.tokens, meter.seconds, meter.retried, self._restarts + restarts)

    @property
    def replicas(self) -> list[Replica]:
        if self._replicas:
            return self._replicas.all
        return []

    def activations(self, tokens: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the outputs of the engine's modules for this sequence, by point
        (models/points.py).
        """
        import safetensors.torch
        import torch

        if not self._alike:
            raise SamplerError("module outputs need engines of the run, in one format")
        self.wait_ready()
        ((answer,)) = self._ask(lambda replicas: replicas.values("activations", [list(tokens)]))
        logprobs = torch.tensor(answer["logprobs"], dtype=torch.float32).unsqueeze(1)
        return safetensors.torch.load(bytes(answer["values"])) | {
            str(Point(Kind.logprob)): logprobs
        }

    def routed_experts(
        self, sequences: Sequence[Sequence[int]], layers: int
    ) -> list[np.ndarray] | None:
        """Return the experts [tokens, layers, experts of a token] of each sequence, -1 in layers
        without; None if unknown.
        """
        if not self._alike:
            return None
        self.wait_ready()
        values = self._ask(
            lambda replicas: replicas.values("routed_experts", [list(one) for one in sequences])
        )
        rows = zip(sequences, values, strict=True) if all(values) else ()
        return [
            np.frombuffer(one, np.int32).reshape(
                len(tokens),
                layers,
                -1,
            )
            for tokens, one in rows
        ] or None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Hold this around an update, including its file writes: an engine that dies meanwhile is
        restarted into it.
        """
        self._ask(lambda replicas: replicas.updates.hold())  # engines may still be starting
        try:
            yield
        finally:
            with suppress(SamplerError):  # the sampler itself has ended
                self._ask(lambda replicas: replicas.updates.release())

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.wait_ready()
        self._ask(lambda replicas: replicas.updates.init(init_info))

    def start_weight_update(self) -> None:
        self.wait_ready()
        self._ask(lambda replicas: replicas.updates.begin())

    def update_weights(self, update_info: Any) -> None:
        """Have every engine verify an update. WeightSyncError: refused; the previous version is
        still served.
        """
        if BY_FORMAT in update_info:
            by_format = {Format(name): info for name, info in update_info[BY_FORMAT].items()}
        else:
            by_format = dict.fromkeys(self._settings.formats, update_info)
        self._ask(lambda replicas: replicas.updates.stage(by_format))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load the verified update in every engine. Restarted engines receive it until the next
        update.
        """
        self.last_sync = self._ask(lambda replicas: replicas.updates.finish())
        self.policy_version = self.last_sync["policy_version"]
        if weight_version is not None and weight_version != str(self.policy_version):
            raise WeightSyncError(
                f"the engines loaded policy version {self.policy_version}, not {weight_version}"
            )

    def sleep(self, level: int = 1) -> None:
        """Release device memory: the cache, and the weights (1: kept in CPU memory, 2: dropped
        until the next sync).
        """
        self.wait_ready()
        self._ask(lambda replicas: replicas.updates.sleep(level))

    def wake(self, tags: list[str] | None = None) -> None:
        """Take memory back for `weights`, `kv_cache`, or both; requests before that are refused."""
        parts: Any = tags
        self._ask(lambda replicas: replicas.updates.wake(parts))

    def health(self) -> dict[str, Any]:
        """Return the status of the first unhealthy engine (else of the first), and a line for each
        engine.
        """
        self.wait_ready()
        return self._ask(lambda replicas: replicas.health())

    def close(self) -> None:
        """End the engines that the run has started; safe to call twice and in any state."""
        if self._loop is not None:
            if self._replicas is not None:
                self._loop.call(self._replicas.shut())
            self._loop.stop()
            self._loop = None
        if self._replicas is not None:
            self._restarts += self._replicas.restarted
            self._replicas.end_processes()
            self._replicas = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _alike(self) -> bool:
        """True if the modules' outputs of every engine are comparable."""
        return len(set(self._settings.formats)) == 1 and not uses_servers(self._settings.sampler)

    def _ask(self, ask: Callable[[Replicas], Coroutine[Any, Any, T]]) -> T:
        """Run a call of the engines on their event loop; return its result."""
        loop = self._loop
        replicas = self._replicas
        if loop is None or replicas is None:
            raise SamplerError(NOT_RUNNING)
        with self._waiting():
            return loop.call(ask(replicas))

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Mark this process as waiting for the engines."""
        section = self._settings.sampler
        limit_s = max(section.request_timeout_s, section.start_timeout_s)
        with waiting("server" if uses_servers(section) else "engine", limit_s):
            yield


class TurnClient:
    """Client for conversations' requests from another event loop."""

    def __init__(
        self,
        loop: EventLoopThread,
        dispatcher: Dispatcher,
        params: SamplingParams,
        close: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._dispatcher = dispatcher
        self._params = params
        self.close = close  # safe to call twice

    async def ask(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int,
        seed: int,
        key: str,
        tools: ToolFormat | None = None,
    ) -> Rollout:
        """Return the response to a request. `key`: see dispatch.Request."""
        params = replace(self._params, max_tokens=max_tokens, tools=tools)
        request = Request(0, Prompt(0, tuple(tokens), "", {}), seed, params, key)
        (rollout,) = await asyncio.wrap_future(self._loop.submit(self._dispatcher.ask(request)))
        # a conversation keeps each completion: keep only the fields that it needs
        return replace(rollout, prompt=replace(rollout.prompt, token_ids=()))


def request_seed(seed: int, group: int) -> int:
    """Return a seed per group, reproducible from the run seed; its samples count upwards from
    there, as in vLLM.
    """
    digest = blake2b(f"{seed}/{group}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2  # leaves room to count samples upwards in 63 bits
