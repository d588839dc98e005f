"""Check of a job's nodes before models load; slurm/prologue.sh runs it on each of them.

python -m megatron_rl.workshop.nodes.check LEARNING RECIPE [key=value ...]     LEARNING: nodes of
the learner

Each node writes into the folders that all share, puts its state into a torch store that the first
one holds, and joins a gloo group. The first one prints the problems to stderr, and the names of
the bad nodes to stdout, unless all are bad.

Exit status of the first: 0 ready, 2 a lasting problem, 75 problems that may pass. Environment:
MEGATRON_RL_NODES=name=address,...  MEGATRON_RL_PORT  and Slurm's own.
"""

import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from megatron_rl.workshop.nodes import facts
from megatron_rl.workshop.nodes.facts import Problem, State

LASTING = 2
PASSING = 75
ARRIVE_S = 120.0  # a node reads Python and torch from a busy file system
FOLDERS_S = 30.0
JOIN_S = 60.0


def wanted_gpus(config: Config, nodes: Sequence[str], learning: int) -> dict[str, int]:
    """GPUs that the learner, the engines on the first node, and the servers need on each node."""
    if config.run.device == Device.cpu or (config.run.device == Device.auto and not facts.gpus()):
        return {}
    gpus = dict.fromkeys(nodes[:learning], -(-Layout.from_config(config.learner).world // learning))
    gpus[nodes[0]] = max(gpus[nodes[0]], max(gpus_of_engines(config.sampler), default=0) + 1)
    serving = nodes[learning:]
    servers = config.sampler.engines - own_engines(config.sampler)
    for node in serving:
        gpus[node] = config.sampler.tensor_parallel * -(-servers // len(serving))
    return gpus


class Meeting:
    """One node's place among the others; `nodes`: name to address, the first one first."""

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
        if self.leads:
            mark = f".nodes-{secrets.token_hex(8)}"
            problems = self._folder_problems(folders, mark)
            self._store.set("mark", mark)
        else:
            mark = self._store.get("mark").decode()
            problems = self._folder_problems(folders, mark)
        state = State(facts.versions(), facts.gpus(), problems)
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
        return facts.judge(states, wanted, gib) + unreached

    def _folder_problems(self, folders: Mapping[str, Path], mark: str) -> list[Problem]:
        look = partial(facts.folder_problems, self._node, folders, mark, self.leads)
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
    os._exit(status)  # a thread may wait for a file system that never answers
