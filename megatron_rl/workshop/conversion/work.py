"""Output folder of a conversion: a journal notes each finished file, a killed run goes on from there, and the folder
gets its name when all tensors have been read back. Until then it is called .TARGET.partial. The journal says first what
is made of what. The threads of conversions and their progress bar are here, too."""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from io import FileIO
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megatron_rl.files import fsync, remove, write_whole
from megatron_rl.models.tensors import reuse_memory
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.sources import Source, Weights, content_digest, digest, note

JOURNAL = ".journal.jsonl"
PACKAGES = ("megatron-rl", "torch", "megatron-core", "safetensors", "transformers", "nvidia-modelopt")
THREADS = 2  # at most: each holds what belongs to one parameter, and a disk is busy with two
Task = TypeVar("Task")
Done = Callable[[int], None]


@dataclass(frozen=True)
class Work:
    """`path`: where to write. `finished`: what is known of each file that is whole."""

    path: Path
    target: Path
    journal: FileIO
    about: Mapping[str, Any]
    finished: dict[str, dict[str, Any]]

    def finish(self, name: str, digests: Mapping[str, str], **about: Any) -> None:
        """Notes that the file is whole, and on disk. `digests`: of its tensors."""
        self.finished[name] = {"digests": dict(digests), **about}
        _add_line(self.journal, {"file": name, "about": self.finished[name]})

    def publish(self, output: Weights, **about: Any) -> None:
        """Reads every tensor once more, by the way that its readers go, and gives the folder its name."""
        known = {name: one for file in self.finished.values() for name, one in file["digests"].items()}
        read = _read_back(output, known, self.path)
        versions = {name: metadata.version(name) for name in PACKAGES}
        made = {"content": content_digest(read), "tensors": len(read)}
        said = {**self.about, **about, "output": made, "versions": versions}
        write_whole(self.path / PARITY, json.dumps(said, indent=1) + "\n")
        (self.path / JOURNAL).unlink()
        for folder in (*(entry for entry in self.path.rglob("*") if entry.is_dir()), self.path):
            fsync(folder)
        self.path.rename(self.target)
        fsync(self.target.parent)


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def begun(
    target: Path, command: str, sources: Sequence[Source], options: Mapping[str, Any], sizes: Mapping[str, int]
) -> Iterator[Work]:
    """`options`: what decides the bytes beside the sources. ValueError in the block: nothing is kept.

    Whatever else ends it, a full disk or a kill, leaves what is finished for the next time.
    `sizes`: bytes that the files will have at least, as far as that is known: OSError where there is no room for them.
    """
    refuse_target(target, sources)
    path = partial_of(target)
    if path.is_symlink():
        raise ValueError(f"{path} is a link; remove it")
    path.mkdir(parents=True, exist_ok=True)
    with FileIO(path / JOURNAL, "a+") as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{target} is being written by another process; name another target") from None
        job = {"command": command, "sources": [source.identity for source in sources], **options}
        finished = _finished(path, journal, job)
        _refuse_full_disk(path, finished, sizes)
        about = {"made_by": command, "inputs": [str(source.path) for source in sources]}
        try:
            yield Work(path, target, journal, about, finished)
        except ValueError:
            remove(path)
            raise


def refuse_target(target: Path, sources: Sequence[Source]) -> None:
    """Refuses what exists, and what lies in a folder that is only read: before anything expensive."""
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already: name another target, or remove it first")
    for folder in (folder for source in sources for folder in (source.path, source.folder)):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{target} lies inside {folder}, which is only read: name a target elsewhere")


def _finished(path: Path, journal: FileIO, job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Whole files of an earlier attempt at the same; the rest of it goes."""
    journal.seek(0)
    whole = journal.readall().rpartition(b"\n")[0]  # a kill may have cut off a line
    try:
        first, *lines = [json.loads(line) for line in whole.split(b"\n")]
    except ValueError:
        first, lines = None, []
    same = first == json.loads(json.dumps(job))
    finished = {line["file"]: line["about"] for line in lines if same and (path / line["file"]).is_file()}
    others = [entry for entry in path.iterdir() if entry.name not in (JOURNAL, *finished)]
    for entry in others:
        remove(entry)
    if finished:
        note(f"goes on with {path}, of which {len(finished)} files are finished")
    elif others and not same:
        note(f"removed what another conversion had begun in {path}")
    journal.truncate(len(whole) + 1 if same else 0)
    if not same:
        _add_line(journal, job)
    return finished


def _add_line(journal: FileIO, line: Mapping[str, Any]) -> None:
    journal.write(json.dumps(line).encode() + b"\n")
    os.fsync(journal.fileno())


def _refuse_full_disk(path: Path, finished: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    needed = sum(size for name, size in sizes.items() if name not in finished)
    if needed > (free := shutil.disk_usage(path).free):
        if not finished:
            remove(path)
        said = f"{needed / 1e9:.1f} GB are still to be written, {free / 1e9:.1f} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {said}", str(path.parent))


def _read_back(output: Weights, known: Mapping[str, str], where: Path) -> dict[str, str]:
    """Digests of all tensors; ValueError names the first that is not what was written."""
    missing, read = sorted(known.keys() - output.specs.keys()), dict[str, str]()
    if missing:
        raise ValueError(f"{where} lacks {missing[0]} after it was written")

    def check(names: list[str], done: Done) -> None:
        reuse_memory()
        get = output.open()
        for name in names:
            read[name] = digest(get(name))
            if read[name] != known.get(name, read[name]):
                raise ValueError(f"{where}: {name} reads otherwise than it was written; is the disk sound?")
            done(output.specs[name].nbytes)

    side_by_side("check", check, shared_out({name: spec.nbytes for name, spec in output.specs.items()}), output.nbytes)
    return read


class Stopped(Exception):
    """Another thread has failed, or all are to end."""


def side_by_side(verb: str, work: Callable[[Task, Done], None], tasks: Sequence[Task], nbytes: int) -> None:
    """Calls `work(task, done)` for each task in a few threads: reading, rounding, hashing, writing leave Python free.

    `done(bytes)` moves a bar of `nbytes`, and raises when another one has failed, or all are to end.
    """
    stop, threads = Event(), torch.get_num_threads()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(verb, total=nbytes)

        def done(count: int) -> None:
            progress.advance(bar, count)
            if stop.is_set():
                raise Stopped

        try:
            share = max(1, threads // _count())
            with ThreadPoolExecutor(_count(), "conversion", torch.set_num_threads, (share,)) as pool:
                running = [pool.submit(work, task, done) for task in tasks]
                try:
                    for one in as_completed(running):
                        one.result()
                except BaseException:
                    stop.set()
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise
        finally:
            torch.set_num_threads(threads)  # what a thread has set is what later ones begin with


def shared_out(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names that follow on each other, about as many bytes for each thread."""
    runs: list[list[str]] = [[] for _ in range(_count())]
    total, before = max(sum(sizes.values()), 1), 0
    for name, nbytes in sizes.items():
        middle = before + nbytes / 2
        runs[min(int(middle * len(runs) / total), len(runs) - 1)].append(name)
        before += nbytes
    return [run for run in runs if run]


def _count() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))
