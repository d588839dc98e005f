"""Reading an update of the `file` transport: map its files and refuse them if anything is wrong.

Knows neither vLLM nor the model: what is expected comes as names, dtypes and shapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import Expected, Manifest, TensorEntry, WeightSyncError


@dataclass(frozen=True)
class Staged:
    """A verified update, mapped into memory and not yet loaded."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    verify_s: float


def stage(
    directory: Path, policy_version: int, writers: int, expected: Mapping[str, Expected], current_version: int
) -> Staged:
    """Map and verify all files of an update; raises WeightSyncError that names what is wrong."""
    start = time.perf_counter()
    manifests = []
    for writer in range(writers):
        read = manifest.read(manifest_path(directory, policy_version, writer))
        manifest.verify_version(read.policy_version, current_version, policy_version)
        if (read.writer, read.writers) != (writer, writers):
            raise WeightSyncError(
                f"manifest {writer} of {writers} says it is {read.writer} of {read.writers}: "
                "the directory mixes two updates"
            )
        manifests.append(read)
    entries = manifest.join(manifests)
    manifest.verify_entries([entry for _, entry in entries.values()], expected)
    folder = version_directory(directory, policy_version)
    tensors = dict(_mapped_tensors(folder, manifests))
    nbytes = sum(entry.nbytes for _, entry in entries.values())
    return Staged(policy_version, tensors, nbytes, time.perf_counter() - start)


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
