"""Reading an update of the `file` transport: map its files and refuse them if anything is wrong.

A version of patches is put together from the last whole one and the patches upon it, all of which lie beside it:
a receiver needs no memory of its own, and one that has just started can read any version.
Knows neither vLLM nor the model: what is expected comes as names, dtypes and shapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.delta import apply_patch
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import Manifest, TensorEntry, WeightSyncError


@dataclass(frozen=True)
class Staged:
    """A verified update, mapped into memory and not yet loaded."""

    policy_version: int
    tensors: Mapping[str, torch.Tensor]
    nbytes: int
    verify_s: float


@dataclass(frozen=True)
class _Stored:
    """One tensor of one version as its file holds it: whole, or a patch."""

    entry: TensorEntry
    data: np.ndarray  # uint8


def stage(
    directory: Path, policy_version: int, writers: int, expected: Mapping[str, TensorSpec], current_version: int
) -> Staged:
    """Map and verify all files of an update; raises WeightSyncError that names what is wrong."""
    start = time.perf_counter()
    manifests = _read_manifests(directory, policy_version, writers)
    for each in manifests:
        manifest.verify_version(each.policy_version, current_version, policy_version)
    entries = manifest.join(manifests)
    manifest.verify_tensors([entry for _, entry in entries.values()], expected)
    newest_first = [_stored(directory, policy_version, manifests), *_built_upon(directory, policy_version, manifests)]
    tensors = {name: _verified_tensor(name, newest_first) for name in entries}
    nbytes = sum(entry.stored_bytes for _, entry in entries.values())
    return Staged(policy_version, tensors, nbytes, time.perf_counter() - start)


def _read_manifests(directory: Path, policy_version: int, writers: int) -> list[Manifest]:
    manifests = []
    for writer in range(writers):
        read = manifest.read(manifest_path(directory, policy_version, writer))
        if (read.writer, read.writers) != (writer, writers):
            raise WeightSyncError(
                f"manifest {writer} of {writers} says it is {read.writer} of {read.writers}: "
                "the directory mixes two updates"
            )
        manifests.append(read)
    return manifests


def _built_upon(directory: Path, policy_version: int, manifests: list[Manifest]) -> Iterator[dict[str, _Stored]]:
    """The versions that a version's patches build on, back to the one that is whole."""
    while (base := manifests[0].base) is not None:
        try:
            manifests = _read_manifests(directory, base, len(manifests))
            manifest.join(manifests)
            manifest.verify_version(manifests[0].policy_version, -1, base)
            yield _stored(directory, base, manifests)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"policy version {policy_version} is a patch of version {base}, which this receiver does not hold: "
                f"{error}"
            ) from error
        if manifests[0].base is not None and manifests[0].base >= base:
            raise WeightSyncError(f"policy version {base} claims to be a patch of version {manifests[0].base}")


def _stored(directory: Path, policy_version: int, manifests: list[Manifest]) -> dict[str, _Stored]:
    folder = version_directory(directory, policy_version)
    stored = {}
    for each in manifests:
        files = {name: _map_file(folder / name, nbytes, each) for name, nbytes in each.files.items()}
        for entry in each.tensors:
            file = files.get(entry.file)
            if file is None or entry.offset < 0 or entry.offset + entry.stored_bytes > len(file):
                raise WeightSyncError(f"tensor {entry.name} lies outside the files of its manifest")
            stored[entry.name] = _Stored(entry, file[entry.offset : entry.offset + entry.stored_bytes])
    return stored


def _map_file(path: Path, nbytes: int, owner: Manifest) -> np.ndarray:
    inside = [entry.name for entry in owner.tensors if entry.file == path.name]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise WeightSyncError(f"missing file {path}, which holds {_some(inside)}") from None
    if size != nbytes:
        cut = [
            entry.name
            for entry in owner.tensors
            if entry.file == path.name and entry.offset + entry.stored_bytes > size
        ]
        raise WeightSyncError(
            f"truncated file {path}: {size} bytes, the manifest says {nbytes}; it holds {_some(cut or inside)}"
        )
    # copy-on-write: torch wants writable memory, the file stays as it is
    return np.memmap(path, dtype=np.uint8, mode="c") if nbytes else np.empty(0, dtype=np.uint8)


def _verified_tensor(name: str, newest_first: list[dict[str, _Stored]]) -> torch.Tensor:
    """The tensor of the newest version, put together from its patches where it has any."""
    entry = newest_first[0][name].entry
    patches: list[_Stored] = []
    for version in newest_first:
        found = version.get(name)
        if found is None or found.entry.changes is None:
            break
        patches.append(found)
    if found is None or found.entry.changes is not None or len(found.data) != entry.nbytes:
        raise WeightSyncError(f"tensor {name} is a patch of a tensor that no version holds")
    data = found.data
    try:
        for patch in reversed(patches):
            apply_patch(data, patch.data, patch.entry.changes or 0)
    except ValueError as error:
        raise WeightSyncError(f"corrupt tensor {name}: {error}") from error
    if manifest.checksum(data.data) != entry.checksum:
        raise WeightSyncError(f"corrupt tensor {name}: its bytes do not match its checksum")
    return torch.from_numpy(data).view(torch_dtype(entry.dtype)).reshape(entry.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
