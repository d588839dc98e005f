"""A folder that one process owns for as long as it lives: a lock says so, however the process ends.

A lock is judged on the kernel that gave it alone: not every shared file system tells other machines about it. The
folder of another machine is left to that machine's next start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from socket import gethostname

LOCK = "owner.lock"  # the kernel's boot id, the host's name, the process
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def claim(folder: Path) -> int:
    """The descriptor of the lock. The file has its name only when it is held: nobody sees it free before."""
    new = folder / f"{LOCK}.new"
    lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # a file system without locks: nobody can take the folder for a dead one's
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{_boot_id()} {gethostname()} {os.getpid()}\n".encode())
        new.rename(folder / LOCK)
    except OSError:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return lock


def current() -> Path | None:
    """The one that this process was given as its temporary folder."""
    folder = Path(tempfile.gettempdir())
    return folder if (folder / LOCK).is_file() else None


def is_abandoned(folder: Path, unnamed: bool = False) -> bool:
    """Whether it is this user's, and its owner has ended. False where that cannot be known.

    `unnamed`: a lock that names nobody was given here, as those of earlier versions were.
    """
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return False
        # for writing: NFS gives no exclusive lock otherwise
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        boot, host, *_ = [*os.read(lock, 1024).decode(errors="replace").split(), "", ""]
        if boot != _boot_id() and (boot or not unnamed):
            return host == gethostname()  # this machine, before it was started again
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
