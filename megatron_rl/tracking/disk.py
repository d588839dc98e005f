"""Writer of a run's lines and rollouts; on a full disk lines wait and rollouts are skipped."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from megatron_rl.logs import logger
from megatron_rl.types import Scored

if TYPE_CHECKING:
    from megatron_rl.tracking.rollout_file import Columns
    from megatron_rl.tracking.run_dir import RunDir

FULL = (errno.ENOSPC, errno.EDQUOT)


class RecordLost(RuntimeError):
    """The run's directory was removed or cannot be written, but not for lack of room."""

    hint = "Leave it in place during the run, or choose another run.root."


class LineFile:
    """A file of whole lines: on a full disk a line waits and is written before the next one."""

    def __init__(self, path: Path) -> None:
        # a killed run may have left half a line
        unfinished = path.exists() and path.stat().st_size and not path.read_bytes().endswith(b"\n")
        self._file = path.open("ab", buffering=0)
        self._waiting = [b"\n"] if unfinished else []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def write(self, line: str) -> None:
        """Raises where the file has been removed."""
        self._waiting.append(line.encode() + b"\n")
        self._catch_up()
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was removed during the run")

    def close(self) -> None:
        """Try once more to write waiting lines; those that fail are lost."""
        self._catch_up()
        self._file.close()

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
    """Files of a run that its driver appends to; tracks writes that a full disk prevented."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._files = {path: LineFile(path) for path in (run.metrics, run.ledger, run.timeline)}
        self._full: set[str] = set()  # kinds of records whose last write failed
        self._lost_rollouts = 0

    def write_line(self, path: Path, line: str) -> None:
        """Append to a file of lines, as soon as there is room."""
        with lasting(path):
            self._files[path].write(line)
        self._report("lines", not any(file.waiting for file in self._files.values()))

    def write_rollouts(
        self, path: Path, scored: Sequence[Scored], **columns: Unpack[Columns]
    ) -> None:
        """Write a step's rollouts; leave the file out where there is no room."""
        from megatron_rl.tracking.rollout_file import write_rollouts

        written = True
        with lasting(path):
            try:
                write_rollouts(path, scored, **columns)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                written = False
                self._lost_rollouts += 1
        self._report("rollouts", written)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    @property
    def news(self) -> dict[str, Any]:
        """Return the part of status.json about failed writes."""
        lines = sum(file.waiting for file in self._files.values())
        if not (lines or self._lost_rollouts or self._full):
            return {}
        return {"unrecorded": {"lines": lines, "rollouts": self._lost_rollouts}}

    def _report(self, what: str, written: bool) -> None:
        """Note once when the disk is full, and once when it has room again."""
        path = self._run.path
        if not written and what not in self._full:
            self._full.add(what)
            logger("run").warning(
                f"{path} has no room for {what}. The run continues: lines wait in "
                "memory, rollouts are left out. Free space there."
            )
        elif written and what in self._full:
            self._full.remove(what)
            logger("run").info(f"{path} has room again: {what} are recorded")


@contextmanager
def lasting(path: Path) -> Iterator[None]:
    """Raise what a write fails with as `RecordLost`."""
    try:
        yield
    except OSError as error:
        raise RecordLost(
            f"{path} cannot be written: {error.strerror or error}. A run needs its directory to "
            "stay where it is"
        ) from error
