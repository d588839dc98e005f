"""Files of the `file` transport: a version's buckets and manifests in a run's own folder, written
and removed.

Each writer (one per pipeline stage and expert rank) writes its own buckets and then, last and
atomically, its manifest: a version is complete when all its manifests exist. With `sync.full_every`
above 1 it may hold patches of the previous version (`delta.py`), which then has to be kept. The
receiver is file_reader.py.

The directory is a private folder of one run. A lock, not a process id, shows whether that run is
still alive: it works across containers that share memory, and the kernel releases it however the
run ends (folder_lock.py).
"""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from megatron_rl.files import replacing
from megatron_rl.models.tensors import TensorSpec, as_bytes
from megatron_rl.processes.folder_lock import claim, is_abandoned
from megatron_rl.processes.scratch import SHARED_MEMORY, remove_with_it
from megatron_rl.weight_sync import manifest as manifests
from megatron_rl.weight_sync.buckets import BUCKET_BYTES
from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.engine_shards import ShardLayout
from megatron_rl.weight_sync.manifest import Manifest, Part, TensorEntry, WeightSyncError

ALIGNMENT = 64  # bytes: tensors begin at cache lines, where copying is fast
BACKGROUND = "background"
PREFIX = "megatron-rl-sync-"
GRACE_S = 60.0  # a folder younger than this may not hold its lock yet
MIB = 1 << 20
SPARE = "spare"  # link to the version whose files the next one overwrites


def version_directory(directory: Path, policy_version: int) -> Path:
    return directory / f"v{policy_version:08d}"


def manifest_path(directory: Path, policy_version: int, writer: int) -> Path:
    return version_directory(directory, policy_version) / f"manifest-{writer:03d}.json"


def update_info(
    directory: Path, policy_version: int, writers: int, background: bool = False
) -> dict[str, Any]:
    """Return the argument of `update_weights`: the version's directory and number of manifests.

    `background`: `update_weights` returns at once, and the engine keeps generating while it
    verifies and builds.
    """
    info = {"directory": str(directory), "policy_version": policy_version, "writers": writers}
    if background:
        return info | {BACKGROUND: True}
    return info


def write_version(
    directory: Path,
    policy_version: int,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    format: str,
    writer: int = 0,
    bucket_bytes: int = BUCKET_BYTES,
    sent: Sent | None = None,
    base: int | None = None,
    cuts: Mapping[str, ShardLayout] | None = None,
) -> Manifest:
    """Write this writer's tensors of one version, consuming `tensors` lazily, and return its
    manifest; a failed version is removed.

    `sent` stores the written bytes; with `base`, their version, tensors are written as patches.
    `cuts`: layouts of tensors that are written part by part.
    """
    folder = version_directory(directory, policy_version)
    folder.mkdir(parents=True, exist_ok=True)
    if sent is not None:
        sent.begin()
    buckets = _Buckets(folder, writer, bucket_bytes, sent, patching=base is not None)
    try:
        for name, tensor in tensors:
            buckets.add(name, tensor, (cuts or {}).get(name))
        buckets.close()
        written = Manifest(policy_version, format, buckets.files, tuple(buckets.entries), base)
        with replacing(manifest_path(directory, policy_version, writer)) as partial:
            partial.write_bytes(manifests.encode(written))
    except OSError as error:
        buckets.discard()
        raise WeightSyncError(
            f"writing policy version {policy_version} into {folder} failed: {error}. "
            "Free space there, or set sync.dir to a larger file system"
        ) from error
    except BaseException:
        buckets.discard()
        raise
    return written


def remove_version(directory: Path, policy_version: int) -> None:
    """Delete a version that no engine will read again."""
    shutil.rmtree(version_directory(directory, policy_version), ignore_errors=True)


def write_over(directory: Path, policy_version: int) -> None:
    """Let the next version overwrite this one's files: much cheaper in shared memory than new
    ones.
    """
    spare = directory / SPARE
    spare.unlink(missing_ok=True)
    spare.symlink_to(version_directory(directory, policy_version).name)


def spare_bytes(directory: Path) -> int:
    """Return the bytes that later versions will overwrite, here and in the folder of each
    format.
    """
    return sum(
        path.stat().st_size
        for pattern in ("", "*/")
        for path in directory.glob(f"{pattern}{SPARE}/*.bin")
    )


class _Buckets:
    """Writer of files of about `bucket_bytes`, with the manifest entry of each tensor."""

    def __init__(
        self, folder: Path, writer: int, bucket_bytes: int, sent: Sent | None, patching: bool
    ) -> None:
        self.files: dict[str, int] = {}
        self.entries: list[TensorEntry] = []
        self._folder = folder
        self._writer = writer
        self._bucket_bytes = bucket_bytes
        self._sent = sent
        self._patching = patching
        self._file: BinaryIO | None = None
        self._name = ""

    def add(self, name: str, tensor: Tensor, cut: ShardLayout | None) -> None:
        spec = TensorSpec.of(name, tensor)
        offset = self._begin()
        if cut is None:
            dim = 0
            length = spec.shape[0] if spec.shape else 1
            parts = [self._part(name, 0, length, tensor)]
        else:
            dim = cut.dim
            parts = [
                self._part(name, start, length, tensor.narrow(dim, start, length))
                for start, length in cut.runs
            ]
        entry = TensorEntry(
            spec.name,
            spec.dtype,
            spec.shape,
            file=self._name,
            offset=offset,
            dim=dim,
            parts=tuple(parts),
        )
        self.entries.append(entry)

    def _part(self, name: str, start: int, length: int, content: Tensor) -> Part:
        data = as_bytes(content.cpu()).numpy()
        stored = data
        changes = None
        if self._sent is not None:
            patch = self._sent.exchange((name, start), data, content.element_size())
            if self._patching and patch is not None:
                stored = patch.data
                changes = patch.changes
        self._write(stored.data)
        checksum = manifests.checksum(data.data, name, start)
        return Part(start, length, data.nbytes, checksum, changes)

    def _begin(self) -> int:
        """Return the next tensor's offset in its bucket, a new one if the last is full."""
        if self._file is None or self.files[self._name] >= self._bucket_bytes:
            self._open_next()
        self._write(memoryview(b"\0" * (-self.files[self._name] % ALIGNMENT)))
        return self.files[self._name]

    def _write(self, data: memoryview) -> None:
        assert self._file is not None
        self.files[self._name] += data.nbytes
        while data:  # partial writes happen on a file system that is nearly full
            data = data[self._file.write(data) :]

    def close(self) -> None:
        if self._file is not None:
            if os.fstat(self._file.fileno()).st_size > self.files[self._name]:
                self._file.truncate()  # the reused file was longer
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
        path = self._folder / self._name
        try:
            (self._folder.parent / SPARE / self._name).rename(path)
            self._file = path.open("r+b", buffering=0)
        except FileNotFoundError:
            self._file = path.open("wb", buffering=0)
        self.files[self._name] = 0


class SyncDir:
    """Private folder of a run's versions."""

    def __init__(self, parent: str | None) -> None:
        """`parent`: sync.dir; None: shared memory."""
        if os.access(SHARED_MEMORY, os.W_OK):
            shared = str(SHARED_MEMORY)
        else:
            shared = tempfile.gettempdir()
        self._parent = Path(shared if parent is None else parent)
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))  # mode 0700
            self._lock = claim(self.path)
        except OSError as error:
            raise WeightSyncError(
                f"sync.dir={self._parent} cannot be used: {error}. Name a writable folder"
            ) from error
        remove_with_it([self.path])

    def require_free(self, nbytes: int) -> None:
        """Raise if so many bytes do not fit; files to be overwritten count as free."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize + spare_bytes(self.path)
        if free < nbytes:
            raise WeightSyncError(
                f"an update of {-(-nbytes // MIB)} MiB does not fit into {self._parent}, "
                f"which has {free // MIB} MiB free: free space there, or set sync.dir to a larger "
                "file system"
            )

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(parent: Path) -> list[Path]:
    """Remove and return the folders of this user's ended runs."""
    old = [folder for folder in parent.glob(PREFIX + "*") if _age(folder) >= GRACE_S]
    stale = [folder for folder in old if is_abandoned(folder, unsigned=True)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _age(folder: Path) -> float:
    try:
        return time.time() - folder.lstat().st_mtime
    except OSError:
        return 0.0  # already removed
