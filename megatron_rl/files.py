"""Atomic writes (under a temporary name, renamed when complete), removal of folders, bounded reads
of regular files.
"""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any, BinaryIO

JsonObject = dict[str, Any]
LARGEST_JSON = 32 << 20
TAIL_BYTES = 64 << 10
LONGEST_LINE = 1000
NOT_REPLACED = "a link, a pipe or a device is there, which is not replaced; name a regular file"


def partial_of(path: Path, pid: int) -> Path:
    """Temporary path at which process `pid` of this machine writes the replacement of `path`."""
    return path.with_name(f".{path.name}.{gethostname()}.{pid}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` on success, and is removed if the block raises.

    Raise OSError before the block where `path` is a link, a pipe or a device: these are kept.
    """
    refuse_special(path)
    partial = partial_of(path, os.getpid())
    try:
        yield partial
        if partial.is_file():
            fsync(partial)
        refuse_special(path)  # it may have been made meanwhile
        partial.replace(path)
    except BaseException:
        remove(partial)
        raise


def refuse_special(path: Path) -> None:
    """Raise OSError if a write to `path` would replace anything but a file or a folder."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise FileExistsError(errno.EEXIST, NOT_REPLACED, str(path))


def fsync(path: Path) -> None:
    """A file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish_folder(partial: Path, target: Path) -> None:
    """Rename a complete folder; the names in it, and its own, are then on the disk."""
    for folder in (*(entry for entry in partial.rglob("*") if entry.is_dir()), partial):
        fsync(folder)
    partial.rename(target)
    fsync(target.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (not its target) or a folder with its content, as far as permitted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def write_atomic(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for a pipe, which may block, or a device."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return open(handle, "rb")
    os.close(handle)
    raise OSError(errno.EINVAL, "no regular file, but a folder, a pipe or a device", str(path))


def read_bounded(path: Path, largest: int = LARGEST_JSON) -> bytes:
    """Read a regular file; OSError for one of more than `largest` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= largest:
            # a file of /proc has no size; none where the kernel has nothing to say
            return file.read(size or largest) or b""
    raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {largest}", str(path))


def read_json(
    path: Path, largest: int = LARGEST_JSON, expected: str = "keys and values"
) -> JsonObject:
    """Read a JSON file with keys; ValueError with the reason if it is missing or wrong."""
    try:
        text = read_bounded(path, largest)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, expected {expected}")
    return found


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, of its last 64 KiB, long ones cut; none if it cannot be read."""
    try:
        with open_regular(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []
    return [line[:LONGEST_LINE] for line in lines]


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    return shutil.disk_usage(existing_folder(path)).free


def existing_folder(path: Path) -> Path:
    """Return the folder of a path, or the nearest one above it that exists."""
    folder = path.absolute()
    return next(one for one in (folder, *folder.parents) if one.is_dir())
