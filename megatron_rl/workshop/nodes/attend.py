"""Part of one node in the check of a job's nodes: reports facts, tests connections and folders,
joins an all-reduce (its processes are this module as a program); and the board, in a torch store,
over which nodes talk.

python -m megatron_rl.workshop.nodes.attend [cuda]     one process of the sum; cuda: an end where
torch sees no GPU RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of such a process come
from the environment.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

# what torch would say of a node that leaves is no news
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
import torch
import torch.distributed as dist
from torch.distributed import DistError, TCPStore

from megatron_rl.processes import gpu_driver
from megatron_rl.workshop.nodes import facts

ARRIVE_S = 120.0  # a node reads Python and torch from a busy file system
ANSWER_S = 60.0
CONNECT_S = 10.0
CLOCK_S = 0.2  # between two words of the first node's clock
RING_S = 180.0  # torch is read, connections are made, and the sums take three seconds
SECONDS = {"cuda": 3.0, "cpu": 0.3}  # of sums
LIMIT = timedelta(seconds=120)
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 18}  # 256 MiB, 1 MiB
NO_RESULT = f"no result within {RING_S:.0f} s"


class Board:
    """JSON by name, in the first node's store: what it says to all, and what each node says to
    it.
    """

    def __init__(self, store: TCPStore) -> None:
        self._store = store

    @classmethod
    def open(cls, address: str, port: int) -> Self:
        """The first node's, whose clock is on it from now on. It listens at this address alone."""
        place = socket.create_server((address, port))
        held = TCPStore(
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=place.detach()
        )
        # another client: one that waits keeps its other threads from talking
        clock = cls.reach(address, port)
        threading.Thread(target=clock._tell_time, daemon=True).start()
        return cls(held)

    @classmethod
    def reach(cls, address: str, port: int) -> Self:
        return cls(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=ARRIVE_S)))

    def say(self, name: str, about: Any) -> None:
        with suppress(DistError):  # the first node has gone
            self._store.set(name, json.dumps(about))

    def hear(self, name: str, seconds: float) -> Any:
        """The words under this name; None where nothing was said in time."""
        try:
            self._store.wait([name], timedelta(seconds=max(seconds, 0.001)))
            return json.loads(self._store.get(name))
        except DistError:
            return None

    def hear_all(self, name: str, nodes: Collection[str], seconds: float) -> dict[str, Any]:
        """Words of each node under this name by then."""
        end = time.monotonic() + seconds
        said = {node: self.hear(f"{name}/{node}", end - time.monotonic()) for node in nodes}
        return {node: about for node, about in said.items() if about is not None}

    def _tell_time(self) -> None:
        with suppress(DistError):  # until the store is gone
            while True:
                self._store.set("clock", json.dumps(time.time()))
                time.sleep(CLOCK_S)


def attend(node: str, nodes: Mapping[str, str], port: int) -> None:
    """Do a node's part of the check: the first one listens at `port`."""
    first = next(iter(nodes))
    try:
        board = Board.reach(nodes[first], port)
    except DistError:
        print(f"nodes: {node} does not reach {first} at {nodes[first]}:{port}", file=sys.stderr)
        return
    clock = board.hear("clock", ANSWER_S)
    mark = board.hear("mark", ANSWER_S)
    if clock is None or mark is None:
        return
    ahead = time.time() - clock
    with socket.create_server((nodes[node], 0), backlog=2 * len(nodes)) as listening:
        about = {"port": listening.getsockname()[1], "ahead_s": ahead, "versions": facts.versions()}
        board.say(f"about/{node}", about | {"gpus": [asdict(gpu) for gpu in facts.gpus()]})
        said = board.hear("peers", ARRIVE_S + ANSWER_S)
        if said is None:
            return
        others = [name for name in said["ports"] if name != node]
        with ThreadPoolExecutor(max(len(others), 1)) as pool:
            reached = list(
                pool.map(lambda name: _connects(nodes[name], said["ports"][name]), others)
            )
        problems = {
            f"{key}={path}": _look(Path(path), mark, node, first) for key, path in said["folders"]
        }
        looked = {
            "unreached": [name for name, there in zip(others, reached, strict=True) if not there],
            "folders": {name: problem for name, problem in problems.items() if problem},
        }
        board.say(f"looked/{node}", looked)
        ring = board.hear("ring", ANSWER_S + ANSWER_S) or {}
    if node in ring:
        why = _take_part(**ring[node])
        board.say(f"sum/{node}", {"why": why, "at": time.time() - ahead})


def _look(path: Path, mark: str, node: str, first: str) -> tuple[str, bool] | None:
    """What is wrong with a folder. A file system that is gone may never answer."""
    found: list[tuple[str, bool] | None] = []
    look = threading.Thread(
        target=lambda: found.append(facts.folder_problem(path, mark, node, first)), daemon=True
    )
    look.start()
    look.join(ANSWER_S / 4)
    if found:
        return found[0]
    return (f"does not answer within {ANSWER_S / 4:.0f} s", False)


def _connects(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), CONNECT_S):
        return True
    return False


def _take_part(address: str, port: int, world: int, rank: int, count: int, cuda: bool) -> str:
    """Runs the processes of this node, one for each GPU; empty, or why the sum failed."""
    command = [sys.executable, "-m", "megatron_rl.workshop.nodes.attend", *["cuda"] * cuda]
    started = []
    for local in range(count):
        place = {
            "RANK": rank + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": world,
            "MASTER_ADDR": address,
        }
        own = os.environ | {
            name: str(value) for name, value in {**place, "MASTER_PORT": port}.items()
        }
        started.append(
            subprocess.Popen(
                command, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
        )
    end = time.monotonic() + RING_S
    try:
        with ThreadPoolExecutor(count) as pool:
            texts = list(
                pool.map(lambda one: one.communicate(timeout=end - time.monotonic())[1], started)
            )
    except subprocess.TimeoutExpired:
        return NO_RESULT
    finally:
        for one in started:
            one.kill()
    for local, (one, text) in enumerate(zip(started, texts, strict=True)):
        if one.returncode:
            lines = text.strip().splitlines()
            return f"process {local}: {lines[-1] if lines else f'exit status {one.returncode}'}"
    return ""


def take_sums() -> None:
    """Sum a tensor over all (NCCL or gloo) for seconds, to see that nodes reach each other as a
    learner needs.
    """
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "cuda" in sys.argv[1:] and device != "cuda":
        sys.exit(gpu_driver.unseen())
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=LIMIT)
    begun = time.monotonic()
    going = torch.ones(1, device=device)
    while going.item():
        values = torch.full((ELEMENTS[device],), float(rank + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == world * (world + 1) / 2).all()):
            sys.exit(
                f"a sum over {world} processes came out wrong on GPU {os.environ['LOCAL_RANK']}"
            )
        going.fill_(float(time.monotonic() - begun < SECONDS[device]))
        dist.all_reduce(going, dist.ReduceOp.MIN)  # all stop at the same time
    dist.destroy_process_group()


if __name__ == "__main__":
    take_sums()
