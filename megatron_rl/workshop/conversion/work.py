"""Output folder of a conversion, called .TARGET.partial until all of its tensors have been read
back; threads of conversions and their progress bar.
"""

import errno
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

from rich.console import Console
from rich.progress import Progress

from megatron_rl.files import fsync, remove, write_whole
from megatron_rl.models.weight_files import PARITY
from megatron_rl.workshop.conversion.sources import Source, Weights, content_digest, digest

PACKAGES = ("megatron-rl", "torch", "megatron-core", "safetensors", "nvidia-modelopt")
THREADS = 2  # each holds what belongs to one parameter
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
        """Read every tensor back, write the certificate, and give the folder its name."""
        read = _read_back(output, self.digests, self.path)
        certificate = {
            **self.about,
            **about,
            "output": {"content": content_digest(read), "tensors": len(read)},
            "versions": {name: metadata.version(name) for name in PACKAGES},
        }
        write_whole(self.path / PARITY, json.dumps(certificate, indent=1) + "\n")
        for folder in (*(entry for entry in self.path.rglob("*") if entry.is_dir()), self.path):
            fsync(folder)
        self.path.rename(self.target)
        fsync(self.target.parent)


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


@contextmanager
def begun(target: Path, command: str, sources: Sequence[Source], nbytes: int = 0) -> Iterator[Work]:
    """Yield the work on a target; its folder is removed where the block raises.

    `nbytes`: needed on the disk at least; OSError where there are fewer.
    """
    refuse_target(target, sources)
    path = partial_of(target)
    remove(path)  # of a conversion that was killed
    path.mkdir(parents=True)
    try:
        free = shutil.disk_usage(path).free
        if nbytes > free:
            reason = f"{nbytes / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {reason}", str(path.parent))
        about = {"made_by": command, "inputs": [str(source.path) for source in sources]}
        yield Work(path, target, about)
    except BaseException:
        remove(path)
        raise


def refuse_target(target: Path, sources: Sequence[Source]) -> None:
    """Refuse a target that exists, or lies in a source, before anything expensive."""
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already: name another target, or remove it first")
    for folder in (folder for source in sources for folder in (source.path, source.folder)):
        if target.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{target} lies inside {folder}: name a target elsewhere")


def _read_back(output: Weights, known: Mapping[str, str], where: Path) -> dict[str, str]:
    """Digests of all tensors; ValueError names the first that is not what was written."""
    read: dict[str, str] = {}
    if missing := known.keys() - output.specs.keys():
        raise ValueError(f"{where} lacks {min(missing)} after it was written")

    def check(names: list[str], done: Done) -> None:
        get = output.open()
        for name in names:
            read[name] = digest(get(name))
            if read[name] != known.get(name, read[name]):
                raise ValueError(
                    f"{where}: {name} reads otherwise than it was written; check the disk"
                )
            done(output.specs[name].nbytes)

    sizes = {name: spec.nbytes for name, spec in output.specs.items()}
    side_by_side("check", check, shared_out(sizes), output.nbytes)
    return read


class Stopped(Exception):
    """Another thread has failed."""


def side_by_side(
    verb: str, work: Callable[[Task, Done], None], tasks: Sequence[Task], nbytes: int
) -> None:
    """Call `work(task, done)` for each task in a few threads: reading, rounding, hashing and
    writing leave Python free.

    `done(bytes)` moves a bar of `nbytes`, and raises when another thread has failed.
    """
    stop = Event()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task(verb, total=nbytes)

        def done(count: int) -> None:
            progress.advance(bar, count)
            if stop.is_set():
                raise Stopped

        with ThreadPoolExecutor(THREADS) as pool:
            try:
                for one in as_completed([pool.submit(work, task, done) for task in tasks]):
                    one.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def shared_out(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names that follow on each other, about as many bytes for each thread."""
    runs: list[list[str]] = [[] for _ in range(THREADS)]
    total = max(sum(sizes.values()), 1)
    before = 0
    for name, nbytes in sizes.items():
        middle = before + nbytes / 2
        runs[min(int(middle * THREADS / total), THREADS - 1)].append(name)
        before += nbytes
    return [run for run in runs if run]
