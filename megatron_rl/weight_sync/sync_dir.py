"""The private folder that versions pass through: made for one run, held by a lock, removed at its end.

The lock, not a process number, says whether a folder's run is still alive: it holds across containers that share
memory, and the kernel drops it however the run ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from megatron_rl.scratch import remove_with_it
from megatron_rl.weight_sync.file_transport import SHARED_MEMORY, spare_bytes
from megatron_rl.weight_sync.manifest import WeightSyncError

PREFIX = "megatron-rl-sync-"
LOCK = "owner.lock"
GRACE_S = 60.0  # a folder this young may not hold its lock yet


class SyncDir:
    def __init__(self, parent: str | None) -> None:
        """`parent`: sync.dir; None takes shared memory."""
        self._parent = Path(parent) if parent is not None else _shared_memory()
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))  # mode 0700
        except OSError as error:
            raise WeightSyncError(f"sync.dir={self._parent} cannot be used: {error}. Name a writable folder") from error
        remove_with_it([self.path])
        self._lock: BinaryIO = (self.path / LOCK).open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def require_free(self, nbytes: int) -> None:
        """Files that the next version will write again count as free."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize + spare_bytes(self.path)
        if free < nbytes:
            raise WeightSyncError(
                f"an update of {nbytes / 2**20:.0f} MiB does not fit into {self._parent}, which has "
                f"{free / 2**20:.0f} MiB free: free space there, or set sync.dir to a larger file system"
            )

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(parent: Path) -> list[Path]:
    """Folders of this user's runs that ended without removing them."""
    removed = []
    for folder in parent.glob(PREFIX + "*"):
        try:
            stat = folder.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < GRACE_S:
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
        except (BlockingIOError, FileNotFoundError, NotADirectoryError):
            continue  # alive, or removed by someone else meanwhile
    return removed


def _shared_memory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
