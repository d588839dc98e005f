"""Writer of a run's lines and rollouts: survives a full disk, removes the oldest files to stay
below `log.disk_gib`.

The oldest recorded rollouts go first, then dumps, then logs; never what a run goes on from.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from megatron_rl.types import Scored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_rl.runs.rollout_file import Columns
    from megatron_rl.runs.run_dir import RunDir

FULL = (errno.ENOSPC, errno.EDQUOT)
NEAR = 0.95  # of the budget: from there on room is made for what comes next
GIB = 1 << 30
FOLLOWS = {
    "lines": "lines of metrics and ledger wait in memory and come later",
    "rollouts": "the rollouts of such steps are left out",
}


class RecordLost(RuntimeError):
    """The run's directory is gone or cannot be written, but not for lack of room."""


class LineFile:
    """A file of lines that is never torn: a full disk takes a line as a whole, or later, before the
    next one.
    """

    def __init__(self, path: Path) -> None:
        # a killed run may have left half a line
        torn = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._waiting = [b"\n"] if torn else []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Raises where the file has been removed."""
        self._waiting.append(line.encode() + b"\n")
        self._catch_up()
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed while the run went on")

    def close(self) -> int:
        """The last try; how many lines never got their place."""
        self._catch_up()
        self._file.close()
        return len(self._waiting)

    def _catch_up(self) -> None:
        while self._waiting and self._take(self._waiting[0]):
            del self._waiting[0]

    def _take(self, line: bytes) -> bool:
        end = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(line)
            while left:  # a disk that is nearly full takes a part first
                left = left[self._file.write(left) :]
        except OSError as error:
            os.ftruncate(self._file.fileno(), end)
            if error.errno in FULL:
                return False
            raise
        return True


class Disk:
    """The driver's way to write what may be missing from a run's directory."""

    def __init__(self, run: RunDir, budget_gib: float | None, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note
        self._limit = None if budget_gib is None else budget_gib * GIB
        if budget_gib is not None:
            self._budget = f"log.disk_gib={budget_gib:g}"
        else:
            self._budget = ""
        self._files = {path: LineFile(path) for path in (run.metrics, run.ledger, run.lanes)}
        self._full: set[str] = set()  # what could not be written when it last came
        self._lost_rollouts = self._lost_lines = self._thinned = 0
        self._short = False

    def write_line(self, path: Path, line: str) -> None:
        """Appends to a file of lines, as soon as there is room."""
        with lasting(path):
            self._files[path].write(line)
        self._went("lines", not any(file.waiting for file in self._files.values()))

    def write_rollouts(
        self, path: Path, scored: Sequence[Scored], **columns: Unpack[Columns]
    ) -> None:
        """Leaves the file out where there is no room."""
        from megatron_rl.runs.rollout_file import write_rollouts

        lost = self._lost_rollouts
        with lasting(path):
            try:
                write_rollouts(path, scored, **columns)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                self._lost_rollouts += 1
        self._went("rollouts", lost == self._lost_rollouts)
        self.thin()

    def close(self) -> None:
        self._lost_lines = sum(file.close() for file in self._files.values())

    @property
    def news(self) -> dict[str, Any]:
        """The part of status.json about what could not be written, or was removed."""
        lines = self._lost_lines or sum(file.waiting for file in self._files.values())
        missing = {"lines": lines, "rollouts": self._lost_rollouts}
        if any(missing.values()) or self._full:
            known = {"unrecorded": missing}
        else:
            known = {}
        return known | ({"thinned_out": self._thinned} if self._thinned else {})

    def thin(self) -> None:
        """Remove the oldest of what can be missed, where the budget is near."""
        if self._limit is None:
            return
        over = size(self._run.path) - NEAR * self._limit
        for path in _oldest_first(self._run) if over > 0 else ():
            if not self._thinned:
                self._note(
                    f"{self._budget} is near: the oldest recorded rollouts, dumps and logs are "
                    "removed"
                )
            over -= size(path)
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(
                missing_ok=True
            )
            self._thinned += 1
            if over <= 0:
                break
        if over > 0 and not self._short:
            self._note(
                f"{self._budget}: what has to stay is {(over + NEAR * self._limit) / GIB:.2f} GiB; "
                "raise it, or lower checkpoint.keep_last"
            )
        self._short = over > 0

    def _went(self, what: str, well: bool) -> None:
        """Says once that there is no room, and once that there is again."""
        if not well and what not in self._full:
            self._note(
                f"warning: {self._run.path} has no room. The run goes on; {FOLLOWS[what]}. Free "
                "space there"
            )
            self._full.add(what)
        elif well and what in self._full:
            self._note(f"{self._run.path} has room again: {what} are recorded")
            self._full.remove(what)


def size(path: Path) -> int:
    """Bytes of a file, or of everything in a folder. What goes away meanwhile counts nothing."""
    total = 0
    inside = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in inside if path.is_dir() else [path]:
        with suppress(OSError):
            total += file.lstat().st_size
    return total


def _oldest_first(run: RunDir) -> Iterator[Path]:
    # of logs this attempt's stay, and what the one before ended with
    for folder, newest in ((run.rollouts, 1), (run.dumps, 1), (run.logs.parent, 2)):
        names = ((path.stem.rpartition("_")[2], path) for path in folder.glob("*_*"))
        found = sorted((int(number), path) for number, path in names if number.isdigit())
        yield from [path for _, path in found][:-newest]


@contextmanager
def lasting(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordLost(
            f"{path} cannot be written: {error.strerror or error}. A run needs its directory to "
            "stay where it is"
        ) from error
