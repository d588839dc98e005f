"""Output folder of a conversion, called .TARGET.partial until all of its tensors have been read
back; threads of conversions and their progress bar.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from megatron_rl.files import fsync, remove, write_whole
from megatron_rl.models.tensors import reuse_memory
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.sources import Source, Weights, content_digest, digest

LOCK = ".lock"
PACKAGES = (
    "megatron-rl",
    "torch",
    "megatron-core",
    "safetensors",
    "transformers",
    "nvidia-modelopt",
)
THREADS = 2  # at most: each holds what belongs to one parameter, and a disk is busy with two
Task = TypeVar("Task")
Done = Callable[[int], None]


@dataclass(frozen=True)
class Work:
    """A folder that is being written."""

    path: Path
    target: Path
    about: Mapping[str, Any]
    digests: dict[str, str] = field(default_factory=dict)  # of the tensors written

    def publish(self, output: Weights, **about: Any) -> None:
        """Reads every tensor once more, by the way that its readers go, and gives the folder its
        name.
        """
        read = _read_back(output, self.digests, self.path)
        versions = {name: metadata.version(name) for name in PACKAGES}
        made = {"content": content_digest(read), "tensors": len(read)}
        said = {**self.about, **about, "output": made, "versions": versions}
        write_whole(self.path / PARITY, json.dumps(said, indent=1) + "\n")
        (self.path / LOCK).unlink()
        for folder in (*(entry for entry in self.path.rglob("*") if entry.is_dir()), self.path):
            fsync(folder)
        self.path.rename(self.target)
        fsync(self.target.parent)


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def begun(
    target: Path, command: str, sources: Sequence[Source], sizes: Mapping[str, int]
) -> Iterator[Work]:
    """Yield the work on a target that nobody else writes; its folder is removed where the block
    raises.

    `sizes`: bytes that the files will have at least, as far as known; OSError where there is no
    room for them.
    """
    refuse_target(target, sources)
    path = partial_of(target)
    if path.is_symlink():
        raise ValueError(f"{path} is a link; remove it")
    path.mkdir(parents=True, exist_ok=True)
    with (path / LOCK).open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(
                f"{target} is being written by another process; name another target"
            ) from None
        try:
            # what a killed conversion has left
            for entry in path.iterdir():
                if entry.name != LOCK:
                    remove(entry)
            _refuse_full_disk(path, sum(sizes.values()))
            about = {"made_by": command, "inputs": [str(source.path) for source in sources]}
            yield Work(path, target, about)
        except BaseException:
            remove(path)
            raise


def refuse_target(target: Path, sources: Sequence[Source]) -> None:
    """Refuses what exists, and what lies in a folder that is only read: before anything
    expensive.
    """
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already: name another target, or remove it first")
    for folder in (folder for source in sources for folder in (source.path, source.folder)):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"{target} lies inside {folder}, which is only read: name a target elsewhere"
            )


def _refuse_full_disk(path: Path, needed: int) -> None:
    free = shutil.disk_usage(path).free
    if needed > free:
        said = f"{needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {said}", str(path.parent))


def _read_back(output: Weights, known: Mapping[str, str], where: Path) -> dict[str, str]:
    """Digests of all tensors; ValueError names the first that is not what was written."""
    missing = sorted(known.keys() - output.specs.keys())
    read = dict[str, str]()
    if missing:
        raise ValueError(f"{where} lacks {missing[0]} after it was written")

    def check(names: list[str], done: Done) -> None:
        reuse_memory()
        get = output.open()
        for name in names:
            read[name] = digest(get(name))
            if read[name] != known.get(name, read[name]):
                raise ValueError(
                    f"{where}: {name} reads otherwise than it was written; is the disk sound?"
                )
            done(output.specs[name].nbytes)

    side_by_side(
        "check",
        check,
        shared_out({name: spec.nbytes for name, spec in output.specs.items()}),
        output.nbytes,
    )
    return read


class Stopped(Exception):
    """Another thread has failed, or all are to end."""


def side_by_side(
    verb: str, work: Callable[[Task, Done], None], tasks: Sequence[Task], nbytes: int
) -> None:
    """Calls `work(task, done)` for each task in a few threads: reading, rounding, hashing, writing
    leave Python free.

    `done(bytes)` moves a bar of `nbytes`, and raises when another one has failed, or all are to
    end.
    """
    stop = Event()
    threads = torch.get_num_threads()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task(verb, total=nbytes)

        def done(count: int) -> None:
            progress.advance(bar, count)
            if stop.is_set():
                raise Stopped

        try:
            share = max(1, threads // _count())
            with ThreadPoolExecutor(
                _count(), "conversion", torch.set_num_threads, (share,)
            ) as pool:
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
    total = max(sum(sizes.values()), 1)
    before = 0
    for name, nbytes in sizes.items():
        middle = before + nbytes / 2
        runs[min(int(middle * len(runs) / total), len(runs) - 1)].append(name)
        before += nbytes
    return [run for run in runs if run]


def _count() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)))
