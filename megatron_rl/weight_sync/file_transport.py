"""The sending half of the `file` transport: bucket files and a manifest in a directory both sides can see.

On one host the directory is shared memory, across hosts a shared file system. Each writer (one per pipeline
stage) writes its own buckets and then, last and atomically, its manifest: a version is complete when all its
manifests exist. The receiving half is `receiver.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_rl.weight_sync import manifest as manifests
from megatron_rl.weight_sync.manifest import Manifest, TensorEntry, WeightSyncError

ALIGNMENT = 64  # bytes: tensors are mapped in place, and kernels like aligned rows
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Written:
    """What one writer contributed to a version."""

    manifest: Path
    tensors: int
    nbytes: int


def version_directory(directory: Path, policy_version: int) -> Path:
    return directory / f"v{policy_version:08d}"


def manifest_path(directory: Path, policy_version: int, writer: int) -> Path:
    return version_directory(directory, policy_version) / f"manifest-{writer:03d}.json"


def update_info(directory: Path, policy_version: int, writers: int) -> dict[str, Any]:
    """The argument of `update_weights`: where the version lies and how many manifests it has."""
    return {"directory": str(directory), "policy_version": policy_version, "writers": writers}


def write_version(
    directory: Path,
    policy_version: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    format: str,
    writer: int = 0,
    writers: int = 1,
    bucket_bytes: int = 64 << 20,
) -> Written:
    """Write this writer's tensors of one version, consuming `tensors` lazily; on failure nothing stays behind."""
    folder = version_directory(directory, policy_version)
    folder.mkdir(parents=True, exist_ok=True)
    buckets = _Buckets(folder, writer, bucket_bytes)
    path = manifest_path(directory, policy_version, writer)
    try:
        for name, tensor in tensors:
            buckets.add(name, tensor)
        buckets.close()
        content = manifests.encode(
            Manifest(policy_version, format, writer, writers, buckets.files, tuple(buckets.entries))
        )
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        buckets.discard()
        raise WeightSyncError(
            f"writing policy version {policy_version} into {folder} failed: {error}. "
            "Free space there, or set sync.dir to a larger file system"
        ) from error
    except BaseException:
        buckets.discard()
        raise
    return Written(path, len(buckets.entries), sum(buckets.files.values()))


def remove_version(directory: Path, policy_version: int) -> None:
    """Delete a version that every engine has loaded (or refused)."""
    shutil.rmtree(version_directory(directory, policy_version), ignore_errors=True)


class _Buckets:
    """Appends tensors to files of about `bucket_bytes`, keeping the entry of each."""

    def __init__(self, folder: Path, writer: int, bucket_bytes: int) -> None:
        self.files: dict[str, int] = {}
        self.entries: list[TensorEntry] = []
        self._folder = folder
        self._writer = writer
        self._bucket_bytes = bucket_bytes
        self._file: BinaryIO | None = None
        self._name = ""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.dtype not in manifests.DTYPE_NAMES:
            raise WeightSyncError(
                f"tensor {name} has the dtype {tensor.dtype}, which the file transport does not carry"
            )
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        if self._file is None or self.files[self._name] >= self._bucket_bytes:
            self._open_next()
        assert self._file is not None
        padding = -self.files[self._name] % ALIGNMENT
        self._file.write(b"\0" * padding)
        offset = self.files[self._name] + padding
        self._file.write(data)
        self.files[self._name] = offset + data.nbytes
        dtype, shape = manifests.DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)
        self.entries.append(TensorEntry(name, dtype, shape, self._name, offset, data.nbytes, manifests.checksum(data)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        try:
            self.close()
        finally:
            for name in self.files:
                (self._folder / name).unlink(missing_ok=True)

    def _open_next(self) -> None:
        self.close()
        self._name = f"bucket-{self._writer:03d}-{len(self.files):04d}.bin"
        self._file = (self._folder / self._name).open("wb", buffering=0)
        self.files[self._name] = 0
