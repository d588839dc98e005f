"""The lock of a run directory: held by the process that owns the run, and by its ranks, as long as one of them lives.

The lock, not a process number, says whether a run goes on: it holds across containers that share a file system, and
the kernel drops it however the run ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from io import FileIO
from pathlib import Path

LOCK = "owner.lock"
LOOKS = 4  # somebody who only asks holds it for a moment
PAUSE_S = 0.05


def hold(folder: Path) -> FileIO | None:
    """The folder's lock, until the file is closed or its last process ends; None where another one holds it."""
    path = folder / LOCK
    for _ in range(LOOKS):
        made = not path.exists()
        # a lock that others can open is one that others can hold
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_EXCL if made else 0)
        try:
            file = FileIO(os.open(path, flags, 0o600), "r+")
        except FileExistsError:
            continue  # made by another start, just now
        if _locked(file, made) and _is(file, path):
            return file
        file.close()
        time.sleep(PAUSE_S)
    return None


def held(folder: Path) -> bool | None:
    """Whether some process holds it; None where that cannot be told."""
    try:
        with (folder / LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def _locked(file: FileIO, made: bool) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: it belongs to whoever made it
        return made
    return True


def _is(file: FileIO, path: Path) -> bool:
    """Not if its folder was moved away in the meantime."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
