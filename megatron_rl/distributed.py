"""Collectives between ranks without pickle: JSON from all to all, maxima and gathers of tensors
over a group, and a way to keep ranks waiting while rank 0 does long work.
"""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


def exchange(value: Any) -> list[Any]:
    """Gather every rank's JSON value, in rank order, on every rank. Tuples arrive as lists."""
    text = json.dumps(value)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(text)]
    world = dist.get_world_size()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]))
    width = int(sizes.max())
    every = torch.zeros(world * width, dtype=torch.uint8)
    dist.all_gather_into_tensor(every, torch.cat((data, data.new_zeros(width - len(data)))))
    rows = every.view(world, width)
    return [
        json.loads(bytes(row[:size].tolist()))
        for row, size in zip(rows, sizes.tolist(), strict=True)
    ]


MARGIN_S = 120.0
WAIT_ON = -1  # sent instead of a size: the other ranks keep waiting
# held by the thread that sends to all ranks while `waited_for` is open
_waited_for = threading.Lock()
_open = False


@contextmanager
def waited_for() -> Iterator[None]:
    """Mark long work on rank 0 that other ranks wait for: `set_wait_policy` prolongs their wait."""
    global _open
    _open = True
    try:
        yield
    finally:
        with _waited_for:
            _open = False


def collective_timeout_s(
    hang_timeout_s: float, start_timeout_s: float, request_timeout_s: float
) -> float:
    """Return torch's collective timeout: longer than any rank may be late, even without a watchdog.
    Rank 0 prolongs the wait of the others periodically; in a sync they wait for three responses of
    the engines, and at first for their start.
    """
    return max(hang_timeout_s, start_timeout_s + 3 * request_timeout_s) + MARGIN_S


def set_wait_policy() -> None:
    """Prolong the other ranks' wait; called periodically by another thread, so that no collective
    times out while rank 0 lives.
    """
    with _waited_for:
        if _open and dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast(torch.tensor([WAIT_ON]), src=0)


def receive_size() -> int:
    """Receive, on a rank other than 0, the size of what rank 0 sends next."""
    size = torch.tensor([WAIT_ON])
    while int(size) == WAIT_ON:
        dist.broadcast(size, src=0)
    return int(size)


class Group(Protocol):
    """The ranks that share a parameter."""

    def max_(self, tensor: Tensor) -> None:
        """Replace by the element-wise maximum over the group."""

    def gather(self, tensor: Tensor, received: Sequence[Tensor], rank: int) -> None:
        """Fill `received` on the group's first rank with the others' tensors; empty elsewhere."""


@dataclass(frozen=True)
class TorchGroup:
    handle: dist.ProcessGroup | None = None  # None: the world

    def max_(self, tensor: Tensor) -> None:
        if dist.is_initialized():  # a lone process need not be
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)

    def gather(self, tensor: Tensor, received: Sequence[Tensor], rank: int) -> None:
        # point to point: a collective would copy the first rank's own share as well
        if rank:
            dist.send(tensor, group=self.handle, group_dst=0)
            return
        pending = [
            dist.irecv(buffer, group=self.handle, group_src=source)
            for source, buffer in enumerate(received, start=1)
        ]
        for work in pending:
            if work is not None:
                work.wait()
