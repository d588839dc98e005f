"""Receiver of `ipc` and `nccl` updates in a vLLM worker: subclasses of vLLM's WeightTransferEngine
that verify first.

Each has `Checked` in front of vLLM's own class. An update is announced (version, names, shapes,
dtypes: compared with the engine's expectation before any transfer), received, sealed (checksums of
every tensor) and loaded.

Tensors wait beside the live weights, on the device, each worker's shard only: nothing changes the
live model before the seal has been verified, as with files. That costs the memory of the worker's
weights again; an engine whose KV cache sleeps during the sync has it.

vLLM imports this module in every worker through `worker_extension_cls`. Run on one GPU
(docs/experiments/gpu-results.md); the checks run on any device and are tested with a real engine on CPUs.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

from megatron_rl.engine import reload
from megatron_rl.engine.readiness import NOTHING_LOADED, SyncState
from megatron_rl.engine.receiver import WorkerExtension, begin  # noqa: F401  vLLM looks here
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.weight_sync import manifest, wire
from megatron_rl.weight_sync.engine_shards import Shard, ShardBuffer
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.wire import BACKEND_PREFIX, Announcement

Tensors = Iterable[tuple[str, torch.Tensor]]


class Inbox:
    """Stand-in for the model in vLLM's transfer engines: collects the tensors that they load."""

    def __init__(self, announced: Announcement, shards: Mapping[str, Shard]) -> None:
        """Hold this rank's shards of the tensors until the seal is verified."""
        self.announced = announced
        self.staged = ShardBuffer(shards)
        self._sums: dict[str, torch.Tensor] = {}
        self._sealed = False

    def load_weights(self, tensors: Tensors) -> set[str]:
        arrived = list(tensors)
        for name, tensor in arrived:
            if name in self._sums:
                raise WeightSyncError(f"duplicate tensor {name}: sent twice in one update")
            self._sums[name] = wire.checksum(tensor)
            # copies: vLLM reuses the buffers that these are views of
            self.staged.take(name, tensor)
        return {name for name, _ in arrived}

    def verify(self, message: Mapping[str, Any]) -> None:
        wire.verify(wire.seal(message), self.announced, wire.read_checksums(self._sums))
        self._sealed = True

    def require_sealed(self) -> None:
        if not self._sealed:
            raise WeightSyncError("finish_weight_update without a verified seal")

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.announced.tensors)


def check_announcement(
    announced: Announcement, expected: Mapping[str, TensorSpec], current_version: int
) -> None:
    names = [tensor.name for tensor in announced.tensors]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
    else:
        twice = []
    if twice:
        raise WeightSyncError(f"duplicate tensor {twice[0]}: announced twice in one update")
    manifest.verify_version(announced.policy_version, current_version, announced.policy_version)
    manifest.verify_tensors(announced.tensors, expected)


class Checked:
    """Mixin before vLLM's WeightTransferEngine that checks an update before it serves: `class
    X(Checked, Base)`.
    """

    building = False  # no background build

    model: torch.nn.Module
    model_config: Any
    device: torch.device
    supports_draft_weight_update = False

    def __init__(
        self,
        config: WeightTransferConfig,
        vllm_config: VllmConfig,
        device: torch.device,
        model: torch.nn.Module,
    ) -> None:
        super().__init__(config, vllm_config, device, model)  # type: ignore[call-arg]
        (self.expected, self.shards), self.state = begin(vllm_config, model), NOTHING_LOADED
        self._inbox: Inbox | None = None

    def start_weight_update(self) -> None:
        """Do nothing: vLLM would prepare the live model here, which waits until the announcement is
        accepted.
        """
        self._inbox = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if wire.ANNOUNCE in update_info:
            self._accept(wire.announcement(update_info))
        elif wire.ABANDON in update_info:
            raise WeightSyncError(str(update_info[wire.ABANDON]))
        elif self._inbox is None:
            raise WeightSyncError("received tensors that were not announced")
        elif wire.SEAL in update_info:
            started = time.perf_counter()
            self._inbox.verify(update_info)
            self.state = replace(self.state, verify_s=time.perf_counter() - started)
        else:
            self._receive(update_info, self._inbox)

    def _accept(self, announced: Announcement) -> None:
        check_announcement(announced, self.expected, self.state.policy_version)
        self._inbox = Inbox(announced, self.shards)

    def _receive(self, update_info: dict[str, Any], inbox: Inbox) -> None:
        if "ipc_handles" in update_info:
            update_info = update_info | {
                "ipc_handles": wire.decode_handles(update_info["ipc_handles"])
            }
        info = self.parse_update_info(update_info)  # type: ignore[attr-defined]
        self.set_weight_update_target(inbox, self.model_config)  # type: ignore[attr-defined]
        try:
            self.receive_weights(info)  # type: ignore[attr-defined]
        finally:
            self.reset_weight_update_target()  # type: ignore[attr-defined]
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        inbox = self._inbox
        self._inbox = None
        if inbox is None:
            raise WeightSyncError("finish_weight_update without an announced update")
        inbox.require_sealed()
        started = time.perf_counter()
        before = self.state
        self.state = replace(before, incomplete=True)
        reload.load(self.model, self.model_config, self.device, inbox.staged.items())
        loaded = time.perf_counter() - started
        self.state = SyncState(
            inbox.announced.policy_version, False, before.verify_s, loaded, inbox.nbytes
        )

    def await_built(self) -> None:
        """Raise if the update was not accepted, as far as that is known before it is loaded."""
        if self._inbox is None:
            raise WeightSyncError("finish_weight_update without an announced update")
        self._inbox.require_sealed()

    def abort(self) -> None:
        """Drop the update."""
        self._inbox = None


class CheckedIPC(Checked, IPCWeightTransferEngine):
    pass


class CheckedNCCL(Checked, NCCLWeightTransferEngine):
    pass


for _transport, _engine in (("ipc", CheckedIPC), ("nccl", CheckedNCCL)):
    if BACKEND_PREFIX + _transport not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND_PREFIX + _transport, _engine)
