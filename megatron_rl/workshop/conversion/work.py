"""An output folder that is made file by file: whole under its name, or not there at all, and gone on with after a kill.

Beside TARGET, .TARGET.partial holds what is finished, and a journal: first what is being made of what, then a line for
each file that is whole. The same command reads it and writes what is missing; the folder takes its name at the end.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any

from megatron_rl.checkpoint.checkpoints import sync_folder
from megatron_rl.files import remove

JOURNAL = "journal.jsonl"


class Work:
    """`path`: where to write. `finished`: file -> what was noted of it."""

    def __init__(self, target: Path, path: Path, journal: FileIO, finished: dict[str, Any]) -> None:
        self.target, self.path, self.finished = target, path, finished
        self._journal, self._lock = journal, Lock()

    def finish(self, name: str, **about: Any) -> None:
        """The file is whole, and on disk. Any thread may say so."""
        with self._lock:
            self.finished[name] = about
            self._write({"file": name, "bytes": (self.path / name).stat().st_size, "about": about})

    def publish(self) -> None:
        (self.path / JOURNAL).unlink()
        for folder in (*(entry for entry in self.path.rglob("*") if entry.is_dir()), self.path):
            sync_folder(folder)
        self.path.rename(self.target)
        sync_folder(self.target.parent)

    def _write(self, line: Mapping[str, Any]) -> None:
        self._journal.write(json.dumps(line).encode() + b"\n")
        os.fsync(self._journal.fileno())


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def begun(
    target: Path,
    inputs: Sequence[Path],
    job: Mapping[str, Any],
    note: Callable[[str], None],
    sizes: Mapping[str, int],
) -> Iterator[Work]:
    """`job`: what is made of what, all that decides the bytes. ValueError in the block: nothing is kept.

    Whatever else ends it, a full disk or a kill, leaves what is finished for the next time. `inputs` are only read.
    `sizes`: bytes that the files will have at least, as far as that is known: OSError where there is no room for them.
    """
    refuse_target(target, inputs)
    path = partial_of(target)
    if path.is_symlink():
        raise ValueError(f"{path} is a link; remove it")
    path.mkdir(parents=True, exist_ok=True)
    with FileIO(path / JOURNAL, "a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{target} is being written by another process; name another target") from None
        finished = _finished(path, journal, job, note)
        _refuse_full_disk(path, finished, sizes)
        work = Work(target, path, journal, finished)
        if os.fstat(journal.fileno()).st_size == 0:
            work._write({"job": job})
        try:
            yield work
        except ValueError:
            remove(path)
            raise


def refuse_target(target: Path, inputs: Sequence[Path]) -> None:
    """Before anything expensive."""
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already: name another target, or remove it first")
    for source in inputs:
        if target.resolve().is_relative_to(source.resolve()):
            raise ValueError(f"{target} lies inside {source}, which is only read: name a target elsewhere")


def _refuse_full_disk(path: Path, finished: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    needed = sum(size for name, size in sizes.items() if name not in finished)
    free = shutil.disk_usage(path).free
    if needed <= free:
        return
    if not finished:
        remove(path)
    said = f"{needed / 1e9:.1f} GB are still to be written, {free / 1e9:.1f} GB are free"
    raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {said}", str(path.parent))


def _finished(path: Path, journal: FileIO, job: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """What of an earlier attempt at the same is whole; the rest of it goes."""
    journal.seek(0)
    lines = list(_lines(journal.readall()))
    finished: dict[str, Any] = {}
    if lines and lines[0].get("job") == json.loads(json.dumps(job)):
        finished = {line["file"]: line["about"] for line in lines[1:] if _is_whole(path, line)}
    elif any(entry.name != JOURNAL for entry in path.iterdir()):
        note(f"removed what another conversion had begun in {path}")
    kept = {path / name for name in finished}
    for entry in sorted(path.rglob("*"), reverse=True):
        if entry != path / JOURNAL and entry not in kept and not (entry.is_dir() and any(entry.iterdir())):
            remove(entry)
    if finished:
        note(f"goes on with {path}, of which {len(finished)} files are finished")
    journal.truncate(0)
    if finished:
        whole = [line for line in lines if "job" in line or line["file"] in finished]
        journal.write(b"".join(json.dumps(line).encode() + b"\n" for line in whole))
        os.fsync(journal.fileno())
    return finished


def _lines(content: bytes) -> Iterator[dict[str, Any]]:
    """Up to the first that a kill has cut off."""
    for line in content.split(b"\n")[:-1]:
        try:
            yield json.loads(line)
        except ValueError:
            return


def _is_whole(path: Path, line: Mapping[str, Any]) -> bool:
    file = path / line["file"]
    return file.is_file() and file.stat().st_size == line["bytes"]
