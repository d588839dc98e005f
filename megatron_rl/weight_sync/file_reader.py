"""Reader of an update of the `file` transport: validates it, then reads this rank's shard of each
requested tensor into memory, applies patches, and compares the checksum. Loading is in
engine/receiver.py.

The verified bytes are the loaded ones, even if the files change meanwhile: nothing is
memory-mapped. A version of patches is built from the last full one and the patches upon it, which
are in the same directory: a receiver that has just started can read any. Independent of vLLM and
the model: expected tensors are given as names, dtypes and shapes.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.weight_sync import manifest
from megatron_rl.weight_sync.delta import apply_patch
from megatron_rl.weight_sync.engine_shards import WHOLE, Shard
from megatron_rl.weight_sync.file_transport import manifest_path, version_directory
from megatron_rl.weight_sync.manifest import Manifest, Part, TensorEntry, WeightSyncError

CHUNK = 1 << 18  # bytes that are read and then hashed, while they are in a core's cache


@dataclass(frozen=True)
class Staged:
    """Validated update."""

    policy_version: int
    tensors: Tensors
    nbytes: int
    verify_s: float


class Tensors(Mapping[str, Tensor]):
    """Tensors by name, each read at every access and refused if its checksum does not match."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        newest_first: list[_Version],
        shards: Mapping[str, Shard],
    ) -> None:
        self.seconds = 0.0  # spent on reading and checking
        self._entries = entries
        self._newest_first = newest_first
        self._shards = shards

    @property
    def nbytes(self) -> int:
        """Return the bytes of the newest version's files that this rank reads."""
        return sum(
            part.stored_bytes for entry in self._entries.values() for part in self._wanted(entry)
        )

    def _wanted(self, entry: TensorEntry) -> list[Part]:
        """Return the parts that overlap this rank's shard."""
        shard = self._shards.get(entry.name, WHOLE)
        return [part for part in entry.parts if shard.needs(entry.dim, part.start, part.length)]

    def __getitem__(self, name: str) -> Tensor:
        start = time.perf_counter()
        try:
            return self._checked(self._entries[name])
        except OSError as error:
            raise WeightSyncError(f"tensor {name} cannot be read: {error}") from error
        finally:
            self.seconds += time.perf_counter() - start

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def _checked(self, newest: TensorEntry) -> Tensor:
        """Return the tensor; only the parts that this rank loads are read."""
        wanted = self._wanted(newest)
        dtype = torch_dtype(newest.dtype)
        if not wanted:
            return torch.empty(1, dtype=dtype).expand(newest.shape)
        whole = torch.empty(newest.shape, dtype=dtype)
        for part in wanted:
            if len(newest.parts) > 1:
                place = whole.narrow(newest.dim, part.start, part.length)
            else:
                place = whole
            if place.is_contiguous():
                data = place
            else:
                data = torch.empty(place.shape, dtype=dtype)
            self._read(
                newest.name,
                part,
                data.reshape(-1).view(torch.uint8).numpy(),
            )
            if data is not place:
                place.copy_(data)
        return whole

    def _read(self, name: str, wanted: Part, data: np.ndarray) -> None:
        """Fill `data` with a part of the newest version, by applying its patches if it has any."""
        patches: list[tuple[_Version, Place]] = []
        for version in self._newest_first:
            place = version.places[name, wanted.start]
            if place.part.changes is None:
                break
            patches.append((version, place))
        checksum = version.read(name, place, data)
        try:
            for version, place in reversed(patches):
                patch = np.empty(place.part.stored_bytes, dtype=np.uint8)
                version.read(name, place, patch)
                apply_patch(data, patch, place.part.changes or 0)
        except ValueError as error:
            raise WeightSyncError(f"corrupt tensor {name}: {error}") from error
        if patches:
            checksum = manifest.checksum(data.data, name, wanted.start)
        if checksum != wanted.checksum:
            raise WeightSyncError(f"corrupt tensor {name}: its bytes do not match its checksum")


@dataclass(frozen=True)
class Place:
    """File and offset of a part."""

    file: str
    offset: int
    part: Part


class _Version:
    """Open files of one version, and the parts stored in them."""

    def __init__(self, directory: Path, policy_version: int, manifests: list[Manifest]) -> None:
        self.places: dict[tuple[str, int], Place] = {}
        self._files: dict[str, int] = {}
        weakref.finalize(self, _close, self._files)
        folder = version_directory(directory, policy_version)
        for each in manifests:
            for name in each.files:
                self._files[name] = _open(folder / name)
            for entry in each.tensors:
                offset = entry.offset
                for part in entry.parts:
                    self.places[entry.name, part.start] = Place(entry.file, offset, part)
                    offset += part.stored_bytes

    def read(self, name: str, place: Place, data: np.ndarray) -> str:
        """Copy the file's content of a part into `data`; return the checksum of that copy."""
        file = self._files[place.file]
        hashed = manifest.hashing(name, place.part.start)
        at = 0
        while at < len(data):
            chunk = data.data[at : at + CHUNK]
            count = os.preadv(file, [chunk], place.offset + at)
            if count == 0:
                raise WeightSyncError(f"truncated file {place.file}: it ends inside tensor {name}")
            hashed.update(chunk[:count])
            at += count
        return hashed.hexdigest()


def stage(
    directory: Path,
    policy_version: int,
    writers: int,
    expected: Mapping[str, TensorSpec],
    current_version: int,
    shards: Mapping[str, Shard] | None = None,
) -> Staged:
    """Open an update; WeightSyncError names the first problem. Checksums are compared as tensors
    are read.

    `shards`: this rank's part of each tensor; other bytes are not read.
    """
    start = time.perf_counter()
    manifests = _read_manifests(directory, policy_version, writers)
    entries = manifest.join(manifests)
    manifest.verify_version(manifests[0].policy_version, current_version, policy_version)
    manifest.verify_tensors(entries.values(), expected)
    newest_first = [
        _Version(directory, policy_version, manifests),
        *_built_upon(directory, policy_version, manifests),
    ]
    tensors = Tensors(entries, newest_first, shards or {})
    return Staged(policy_version, tensors, tensors.nbytes, time.perf_counter() - start)


def _read_manifests(directory: Path, policy_version: int, writers: int) -> list[Manifest]:
    return [
        manifest.read(manifest_path(directory, policy_version, writer)) for writer in range(writers)
    ]


def _built_upon(
    directory: Path, policy_version: int, manifests: list[Manifest]
) -> Iterator[_Version]:
    """Return the versions that a version's patches build on, back to the full one."""
    while (base := manifests[0].base) is not None:
        try:
            manifests = _read_manifests(directory, base, len(manifests))
            yield _Version(directory, base, manifests)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"policy version {policy_version} is a patch of version {base}, which this "
                f"receiver does not hold: {error}"
            ) from error


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightSyncError(f"file {path} cannot be opened: {error.strerror}") from None


def _close(files: dict[str, int]) -> None:
    for file in files.values():
        os.close(file)
