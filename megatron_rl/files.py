"""Atomic writes (under a temporary name, renamed when whole), removal of folders, bounded reads of JSON and logs."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any

LARGEST_JSON = 32 << 20
TAIL_BYTES = 64 << 10
LONGEST_LINE = 1000


def partial_of(path: Path, pid: int) -> Path:
    """Temporary path at which process `pid` of this machine writes the replacement of `path`."""
    return path.with_name(f".{path.name}.{gethostname()}.{pid}.partial")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` when the block succeeds, and is removed when it raises."""
    partial = partial_of(path, os.getpid())
    try:
        yield partial
        if partial.is_file():
            fsync(partial)
        partial.replace(path)
    except BaseException:
        remove(partial)
        raise


def fsync(path: Path) -> None:
    """A file's content, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """A folder with all that is in it, a file, or a link and not what it leads to; as far as that is allowed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def read_json(path: Path, largest: int = LARGEST_JSON, expected: str = "keys and values") -> dict[str, Any]:
    """The keys of a JSON file that somebody else wrote; ValueError says what is wrong with it."""
    try:
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # a pipe, or a device that never ends
            raise ValueError(f"{path} is no file")
        if about.st_size > largest:
            raise ValueError(f"{path} has {about.st_size} bytes, expected at most {largest}")
        text = path.read_bytes()
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
    """The last lines of a log, out of its last 64 KiB, overlong ones cut; none where it cannot be read."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = log.read(TAIL_BYTES).decode(errors="replace").rstrip().splitlines()[-count:]
    except OSError:
        return []
    return [line[:LONGEST_LINE] for line in lines]
