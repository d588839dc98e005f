"""Lock of a folder: take it, sign it, find its holder, detect that its owner has ended; this
process's own folder.

A lock is valid only on the kernel that granted it, as not every shared file system propagates locks
to other machines.
"""

import errno
import fcntl
import os
import shutil
import stat
import tempfile
import time
from io import FileIO
from pathlib import Path
from socket import gethostname

from megatron_rl.files import read_bounded

LOCK = "owner.lock"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LOOKS = 4  # retries: a check by another process holds the lock for a moment
PAUSE_S = 0.05


def hold(folder: Path) -> FileIO | None:
    """Take the folder's lock, until the file is closed or its last process ends; None if it is
    held.
    """
    path = folder / LOCK
    for _ in range(LOOKS):
        # a lock file that others can open is one that others can lock
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        file = FileIO(os.open(path, flags, 0o600), "r+")
        if _locked(file) and _is(file, path):
            return file
        file.close()
        time.sleep(PAUSE_S)
    return None


def held(folder: Path) -> bool | None:
    """Return True if some process holds the lock; None if unknown."""
    try:
        with FileIO(
            os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        ) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def claim(folder: Path) -> FileIO:
    """Lock a folder that was just created, and sign it with its owner: kernel, host, process."""
    try:
        lock = hold(folder)
        if lock is None:
            raise BlockingIOError(errno.EWOULDBLOCK, "another process holds its lock", str(folder))
        sign(lock)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return lock


def sign(lock: FileIO) -> None:
    """Replace the signature by this process's."""
    lock.seek(0)
    lock.truncate()
    os.write(lock.fileno(), f"{_boot_id()} {gethostname()} {os.getpid()}\n".encode())


def holder(folder: Path) -> tuple[int, str] | None:
    """Return process and host of the signature; None if there is none, or it is unreadable."""
    try:
        _, host, pid = read_bounded(folder / LOCK).decode().split()
        return int(pid), host
    except (OSError, ValueError):
        return None


def current() -> Path | None:
    """Return this process's temporary folder, if it was given one with a lock."""
    folder = Path(tempfile.gettempdir())
    if (folder / LOCK).is_file():
        return folder
    return None


def is_abandoned(folder: Path, unsigned: bool = False) -> bool:
    """True if it is this user's and its owner is known to have ended; `unsigned`: or was killed
    before it signed the lock.
    """
    try:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid():
            return False
        # opened for writing: NFS grants no exclusive lock otherwise
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        boot, host, *_ = [*os.read(lock, 1024).decode(errors="replace").split(), "", ""]
        if boot != _boot_id() and (boot or not unsigned):
            return host == gethostname()  # this machine, before a reboot
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _locked(file: FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # a file system without locks


def _is(file: FileIO, path: Path) -> bool:
    """True if the path still is this file: its folder may have been moved meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"
