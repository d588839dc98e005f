"""The private folder that versions pass through: made for one run, held by a lock, removed at its end.

The lock, not a process number, says whether a folder's run is still alive: it holds across containers that share
memory, and the kernel drops it however the run ends (owned_folder.py).
"""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from megatron_rl.processes.owned_folder import LOCK as LOCK
from megatron_rl.processes.owned_folder import claim, is_abandoned
from megatron_rl.processes.scratch import remove_with_it
from megatron_rl.weight_sync.file_transport import SHARED_MEMORY, spare_bytes
from megatron_rl.weight_sync.manifest import WeightSyncError

PREFIX = "megatron-rl-sync-"
GRACE_S = 60.0  # a folder this young may not hold its lock yet


class SyncDir:
    def __init__(self, parent: str | None) -> None:
        """`parent`: sync.dir; None takes shared memory."""
        self._parent = Path(parent) if parent is not None else _shared_memory()
        try:
            self._parent.mkdir(parents=True, exist_ok=True)
            remove_stale(self._parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._parent))  # mode 0700
            self._lock = claim(self.path)
        except OSError as error:
            raise WeightSyncError(f"sync.dir={self._parent} cannot be used: {error}. Name a writable folder") from error
        remove_with_it([self.path])

    def require_free(self, nbytes: int) -> None:
        """Files that the next version will write again count as free."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize + spare_bytes(self.path)
        if free < nbytes:
            raise WeightSyncError(
                f"an update of {_mib(nbytes, math.ceil)} MiB does not fit into {self._parent}, which has "
                f"{_mib(free, math.floor)} MiB free: free space there, or set sync.dir to a larger file system"
            )

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale(parent: Path) -> list[Path]:
    """Folders of this user's runs that ended without removing them. What else has such a name is nobody's business."""
    old = [folder for folder in parent.glob(PREFIX + "*") if _age(folder) >= GRACE_S]
    stale = [folder for folder in old if is_abandoned(folder)]
    for folder in stale:
        shutil.rmtree(folder, ignore_errors=True)
    return stale


def _age(folder: Path) -> float:
    try:
        return time.time() - folder.lstat().st_mtime
    except OSError:
        return 0.0  # gone


def _mib(nbytes: int, rounded: Callable[[float], int]) -> str:
    """To a tenth, up for what is needed and down for what there is, so that the two never look equal."""
    return f"{rounded(nbytes / 2**20 * 10) / 10:.1f}".removesuffix(".0")


def _shared_memory() -> Path:
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
