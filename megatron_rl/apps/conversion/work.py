"""Output folder of a conversion, named .TARGET.partial until all tensors have been read back."""

import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from megatron_rl.apps.conversion.sources import Source, Weights, content_digest, digest
from megatron_rl.files import publish_folder, remove, write_json
from megatron_rl.models.weight_files import PARITY

PACKAGES = ("megatron-rl", "torch", "megatron-core", "safetensors", "nvidia-modelopt")
Item = TypeVar("Item")


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
        write_json(self.path / PARITY, certificate)
        publish_folder(self.path, self.target)


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
    if missing := known.keys() - output.specs.keys():
        raise ValueError(f"{where} lacks {min(missing)} after it was written")
    read: dict[str, str] = {}
    get = output.open()
    for name in progress("check", output.specs):
        read[name] = digest(get(name))
        if read[name] != known.get(name, read[name]):
            raise ValueError(f"{where}: {name} reads otherwise than it was written; check the disk")
    return read


def progress(verb: str, items: Iterable[Item]) -> Iterable[Item]:
    """The items, with a bar on the screen."""
    return track(list(items), verb, console=Console(stderr=True))
