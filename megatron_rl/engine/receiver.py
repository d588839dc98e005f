"""Receiver of the `file` transport in a vLLM worker, which verifies a complete update before any of
it reaches the live model; and the worker methods of every transport.

vLLM imports this module in every worker through `worker_extension_cls`. An update has two phases:
`update_weights` checks version, names, shapes, dtypes, sizes and checksums, and builds the new
weights beside the live ones if the model allows it (`double_buffer`); `finish_weight_update` swaps
them in, or loads in place, once every worker has accepted the update. With `background` the first
phase runs in a thread, while the engine keeps generating from its current weights;
`await_weight_update` then ends it.
"""

import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl.engine import cpu_kernels, double_buffer, expectation, reload
from megatron_rl.engine.hooks import CachedChoices, ModuleOutputs, RouterChoices
from megatron_rl.engine.readiness import NOTHING_LOADED, SyncState
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.processes.process import die_with_spawner
from megatron_rl.processes.threads import in_thread, use_all_cores
from megatron_rl.weight_sync.engine_shards import Shard, ShardBuffer
from megatron_rl.weight_sync.file_reader import stage
from megatron_rl.weight_sync.manifest import NO_VERSION, WeightSyncError

BACKEND = "file"
ROOM = 1.5  # free device memory needed to stage an update, relative to its bytes


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Empty settings: files need no rendezvous."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    directory: str
    policy_version: int
    writers: int
    background: bool = False


@dataclass(frozen=True)
class _Ready:
    """Accepted update."""

    policy_version: int
    verify_s: float
    nbytes: int
    make_live: Callable[[], None]
    build_s: float


def begin(
    vllm_config: VllmConfig, model: torch.nn.Module
) -> tuple[dict[str, TensorSpec], dict[str, Shard]]:
    """Prepare a worker for updates of any transport: the tensors that each must contain, and the
    shards to load.
    """
    die_with_spawner()
    if vllm_config.load_config.load_format == "dummy":
        expectation.neutral_cache_scales(model)
    return expectation.expected_tensors(
        model, bool(vllm_config.model_config.hf_config.tie_word_embeddings)
    )


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        (self.expected, self.shards), self.state = begin(vllm_config, model), NOTHING_LOADED
        self._doubles = device.type == "cpu" and double_buffer.can_double(model)
        self._building: Future[_Ready] | None = None
        # an abandoned update may still be in progress
        self._one_at_a_time = threading.Lock()

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._building = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        if update_info.background:
            self._building = in_thread(
                "weight-sync-builder", partial(self._build_beside, update_info)
            )
            return
        self._building = Future()
        self._building.set_result(self._build(update_info))

    @property
    def building(self) -> bool:
        return self._building is not None and not self._building.done()

    def await_built(self) -> _Ready:
        """Wait until the update of `update_weights` is verified and built; raise if it is
        refused.
        """
        if self._building is None:
            raise WeightSyncError("finish_weight_update without an accepted update_weights")
        return self._building.result()

    def _build_beside(self, update_info: FileUpdateInfo) -> _Ready:
        use_all_cores()
        with self._one_at_a_time:
            return self._build(update_info)

    def _build(self, update_info: FileUpdateInfo) -> _Ready:
        staged = stage(
            Path(update_info.directory),
            update_info.policy_version,
            update_info.writers,
            self.expected,
            self.state.policy_version,
            shards=self.shards,
        )
        start = time.perf_counter()
        checking = staged.tensors.seconds
        # everything is read and verified before the live weights change: into a twin, or beside
        # them
        make_live = self.prepare(staged.tensors if self._doubles else self._held(staged.tensors))
        checked = staged.tensors.seconds - checking
        built = time.perf_counter() - start - checked
        return _Ready(
            staged.policy_version, staged.verify_s + checked, staged.nbytes, make_live, built
        )

    def _held(self, tensors: Mapping[str, torch.Tensor]) -> ShardBuffer:
        """Stage tensors on the device, for the fastest load, if it has memory for them and a layer
        being loaded.
        """
        held = ShardBuffer.of(tensors, self.shards)
        if (
            self.device.type == "cuda"
            and torch.cuda.mem_get_info(self.device)[0] > ROOM * held.nbytes
        ):
            held.move(self.device)
        return held

    def finish_weight_update(self) -> None:
        ready = self.await_built()
        self._building = None
        start = time.perf_counter()
        try:
            ready.make_live()
        except BaseException:
            self.state = replace(self.state, incomplete=True)
            raise
        load_s = time.perf_counter() - start
        self.state = SyncState(
            ready.policy_version, False, ready.verify_s, load_s, ready.nbytes, ready.build_s
        )

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Callable[[], None]:
        """Do the work that is possible while the current weights are served; return the rest as a
        callable.
        """
        if self._doubles:
            return double_buffer.SecondBuffer(self.model, tensors).swap
        return partial(reload.load, self.model, self.model_config, self.device, tensors.items())

    def abort(self) -> None:
        self._building = None

    def shutdown(self) -> None:
        self.abort()


class WorkerExtension:
    """Methods that vLLM adds to its workers, called by name through `collective_rpc`."""

    weight_transfer_engine: FileWeightTransferEngine
    _weight_update_active: bool
    _watch: ModuleOutputs
    _routes: RouterChoices
    _choices: CachedChoices
    model_runner: Any
    rank: int

    # version and values of the cache's scales
    _scales_seen: tuple[int, dict[str, tuple[float, float]]] | None = None

    def weight_sync_state(self) -> dict[str, Any]:
        """Return the sync state. `intact`: the cache's scales are those that this version was
        loaded with.
        """
        state = self.weight_transfer_engine.state
        scales = expectation.cache_scales(self.weight_transfer_engine.model)
        if self._scales_seen is None or self._scales_seen[0] != state.policy_version:
            self._scales_seen = (state.policy_version, scales)
        return asdict(state) | {"intact": scales == self._scales_seen[1]}

    def guarded_call(self, method: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
        """Call a worker method; return a failure as (type, message).

        An exception in one of several workers would leave the replies of the others in vLLM's
        queue, to be taken for the replies of the next call.
        """
        try:
            getattr(self, method)(**arguments)
        except Exception as error:
            traceback.print_exc()
            return type(error).__name__, str(error)
        return None

    def await_weight_update(self) -> None:
        self.weight_transfer_engine.await_built()

    def weight_update_building(self) -> bool:
        return self.weight_transfer_engine.building

    def abort_weight_update(self) -> None:
        """End an update that some worker refused, so that the next one can start."""
        self._weight_update_active = False
        self.weight_transfer_engine.abort()

    def forget_version(self) -> None:
        """Forget the loaded version: a server that another run has used accepts any version
        again.
        """
        engine = self.weight_transfer_engine
        engine.state = replace(engine.state, policy_version=NO_VERSION)

    def watch_activations(self) -> None:
        self._watch = ModuleOutputs(self.weight_transfer_engine.model)

    def observed_activations(self) -> bytes:
        """Return the values recorded since `watch_activations`, and remove its hooks."""
        return self._watch.end()

    def watch_routes(self) -> None:
        self._routes = RouterChoices(self.weight_transfer_engine.model)

    def keep_choices(self, layers: int, experts: int) -> None:
        self._choices = CachedChoices(self.model_runner, layers, experts)

    def cached_choices(self, wanted: list[tuple[str, int]]) -> list[np.ndarray | None]:
        """Return the experts of each request's first tokens, on the first rank (all ranks route
        alike).
        """
        if not self.rank:
            return [self._choices.of(name, tokens) for name, tokens in wanted]
        return []

    def observed_routes(self, tokens: int, layers: int) -> bytes:
        """Return the choices recorded since `watch_routes`, and remove its hooks."""
        return self._routes.end(tokens, layers)


# a second import (a test module and a worker in one process) must not fail
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
cpu_kernels.install()
