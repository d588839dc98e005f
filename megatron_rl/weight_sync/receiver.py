"""The receiving half of the `file` transport: a vLLM weight-transfer engine, registered when this is imported.

vLLM imports this module in every worker through `worker_extension_cls`. An update has two phases: `update_weights`
maps the files and checks version, names, shapes, dtypes, sizes and checksums; `finish_weight_update` loads.
Nothing touches the live model before every worker has accepted the whole update.
"""

from __future__ import annotations

import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from megatron_rl.weight_sync import expectation, host_kernels, reload
from megatron_rl.weight_sync.file_reader import Staged, stage
from megatron_rl.weight_sync.manifest import WeightSyncError

BACKEND = "file"
NO_VERSION = -1  # the engine still holds its dummy weights


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    directory: str
    policy_version: int
    writers: int


@dataclass(frozen=True)
class SyncState:
    """What a worker serves, and what its last update cost."""

    policy_version: int
    torn: bool  # loading failed half-way: the weights are of no version
    verify_s: float
    load_s: float
    nbytes: int


class FileWeightTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        tied = bool(vllm_config.model_config.hf_config.tie_word_embeddings)
        self.expected = expectation.expected_tensors(model, tied)
        if vllm_config.load_config.load_format == "dummy":
            expectation.neutral_cache_scales(model)
        self.state = SyncState(NO_VERSION, False, 0.0, 0.0, 0)
        self._staged: Staged | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self._staged = stage(
            Path(update_info.directory),
            update_info.policy_version,
            update_info.writers,
            self.expected,
            self.state.policy_version,
        )

    def finish_weight_update(self) -> None:
        staged, self._staged = self._staged, None
        if staged is None:
            raise WeightSyncError("finish_weight_update without an accepted update_weights")
        start = time.perf_counter()
        try:
            self.load(staged.tensors.items())
        except BaseException:
            self.state = SyncState(self.state.policy_version, True, staged.verify_s, 0.0, staged.nbytes)
            raise
        load_s = time.perf_counter() - start
        self.state = SyncState(staged.policy_version, False, staged.verify_s, load_s, staged.nbytes)

    def load(self, tensors: Any) -> None:
        reload.load(self.model, self.model_config, self.device, tensors)

    def abort(self) -> None:
        self._staged = None

    def shutdown(self) -> None:
        self.abort()


class WorkerExtension:
    """Methods that vLLM adds to its workers, called by name through `collective_rpc`."""

    weight_transfer_engine: FileWeightTransferEngine
    _weight_update_active: bool

    _scales_seen: tuple[int, dict[str, tuple[float, float]]] | None = None  # of which version, and what they were

    def weight_sync_state(self) -> dict[str, Any]:
        """`intact`: the cache's scales are still those that this version was loaded with."""
        state = self.weight_transfer_engine.state
        scales = expectation.cache_scales(self.weight_transfer_engine.model)
        if self._scales_seen is None or self._scales_seen[0] != state.policy_version:
            self._scales_seen = (state.policy_version, scales)
        return asdict(state) | {"intact": scales == self._scales_seen[1]}

    def guarded_call(self, method: str, arguments: dict[str, Any]) -> tuple[str, str] | None:
        """Call a worker method; a failure comes back as (type, message).

        An exception in one of several workers would leave the answers of the others in vLLM's queue, to be
        taken for the answers of the next call.
        """
        try:
            getattr(self, method)(**arguments)
        except Exception as error:
            traceback.print_exc()
            return type(error).__name__, str(error)
        return None

    def abort_weight_update(self) -> None:
        """End an update that some worker refused, so that the next one can start."""
        self._weight_update_active = False
        self.weight_transfer_engine.abort()

    def forget_version(self) -> None:
        """What is loaded counts as no version: a server that another run has used takes any version again."""
        engine = self.weight_transfer_engine
        engine.state = replace(engine.state, policy_version=NO_VERSION)


# importing twice (a test module and a worker in one process) must not fail
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
host_kernels.install()
