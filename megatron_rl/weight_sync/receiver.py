"""The receiving half of the `file` transport: a vLLM weight-transfer engine, registered when this is imported.

vLLM imports this module in every worker through `worker_extension_cls`. An update has two phases: `update_weights`
maps the files and checks version, names, shapes, dtypes, sizes and checksums; `finish_weight_update` loads.
Nothing touches the live model before every worker has accepted the whole update.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
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

from megatron_rl.weight_sync import expectation, host_kernels, manifest, reload
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import Expected, Manifest, TensorEntry, WeightSyncError

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


@dataclass(frozen=True)
class Staged:
    """A verified update, mapped into memory and not yet loaded."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    verify_s: float


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
        self.state = SyncState(NO_VERSION, False, 0.0, 0.0, 0)
        self._staged: Staged | None = None

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        self._staged = stage(update_info, self.expected, self.state.policy_version)

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

    def weight_sync_state(self) -> dict[str, Any]:
        return asdict(self.weight_transfer_engine.state)

    def abort_weight_update(self) -> None:
        """End an update that some worker refused, so that the next one can start."""
        self._weight_update_active = False
        self.weight_transfer_engine.abort()


def stage(info: FileUpdateInfo, expected: Mapping[str, Expected], current_version: int) -> Staged:
    """Map and verify all files of an update; raises WeightSyncError that names what is wrong."""
    start = time.perf_counter()
    directory = Path(info.directory)
    manifests = []
    for writer in range(info.writers):
        read = manifest.read(manifest_path(directory, info.policy_version, writer))
        manifest.verify_version(read.policy_version, current_version, info.policy_version)
        if (read.writer, read.writers) != (writer, info.writers):
            raise WeightSyncError(
                f"manifest {writer} of {info.writers} says it is {read.writer} of {read.writers}: "
                "the directory mixes two updates"
            )
        manifests.append(read)
    entries = manifest.join(manifests)
    manifest.verify_entries([entry for _, entry in entries.values()], expected)
    folder = version_directory(directory, info.policy_version)
    tensors = dict(_mapped_tensors(folder, manifests))
    nbytes = sum(entry.nbytes for _, entry in entries.values())
    return Staged(info.policy_version, tensors, nbytes, time.perf_counter() - start)


def _mapped_tensors(folder: Path, manifests: list[Manifest]) -> Iterator[tuple[str, torch.Tensor]]:
    for each in manifests:
        files = {name: _map_file(folder / name, nbytes, each) for name, nbytes in each.files.items()}
        for entry in each.tensors:
            yield entry.name, _verified_tensor(entry, files)


def _map_file(path: Path, nbytes: int, owner: Manifest) -> np.ndarray:
    inside = [entry.name for entry in owner.tensors if entry.file == path.name]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise WeightSyncError(f"missing file {path}, which holds {_some(inside)}") from None
    if size != nbytes:
        cut = [entry.name for entry in owner.tensors if entry.file == path.name and entry.offset + entry.nbytes > size]
        raise WeightSyncError(
            f"truncated file {path}: {size} bytes, the manifest says {nbytes}; it holds {_some(cut or inside)}"
        )
    # copy-on-write: torch wants writable memory, the file stays as it is
    return np.memmap(path, dtype=np.uint8, mode="c") if nbytes else np.empty(0, dtype=np.uint8)


def _verified_tensor(entry: TensorEntry, files: Mapping[str, np.ndarray]) -> torch.Tensor:
    file = files.get(entry.file)
    if file is None or entry.offset < 0 or entry.offset + entry.nbytes > len(file):
        raise WeightSyncError(f"tensor {entry.name} lies outside the files of its manifest")
    data = file[entry.offset : entry.offset + entry.nbytes]
    if manifest.checksum(data.data) != entry.checksum:
        raise WeightSyncError(f"corrupt tensor {entry.name}: its bytes do not match its checksum")
    return torch.from_numpy(data).view(manifest.DTYPES[entry.dtype]).reshape(entry.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# importing twice (a test module and a worker in one process) must not fail
if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FileWeightTransferEngine)
host_kernels.install()
