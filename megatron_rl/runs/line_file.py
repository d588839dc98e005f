"""A file of lines that is never torn: a full disk takes a line as a whole, or later.

Lines that it has not taken wait in memory, and go in before the next one.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: OSError) -> bool:
    return error.errno in FULL


class LineFile:
    """Appends after the last whole line: a killed run may have left half of one."""

    def __init__(self, path: Path) -> None:
        torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._waiting = [b"\n"] if torn else []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Raises where the file is not in its place any more."""
        self._waiting.append(line.encode() + b"\n")
        while self._waiting and self._take(self._waiting[0]):
            del self._waiting[0]
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def close(self) -> int:
        """The last try; how many lines never got their place."""
        while self._waiting and self._take(self._waiting[0]):
            del self._waiting[0]
        self._file.close()
        return len(self._waiting)

    def _take(self, line: bytes) -> bool:
        end = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(line)
            while left:  # a disk that is nearly full takes a part first
                left = left[self._file.write(left) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            if is_full(error):
                return False
            raise
        return True
