"""Buckets of a weight sync: parameters whose parts the first rank of a tensor-parallel group
gathers into full tensors.

Every rank knows every other rank's part from the mapping table, so contents are sent as raw bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.distributed import Group
from megatron_rl.models.layout import Place
from megatron_rl.models.mapping import HfSlice, Param, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups
from megatron_rl.models.table import Split
from megatron_rl.models.tensors import as_bytes
from megatron_rl.quantization.formats import Output, outputs

NamedTensors = Iterator[tuple[str, Tensor]]
BUCKET_BYTES = 64 << 20  # smaller ones are no faster: see docs/experiments/benchmarks.md


@dataclass(frozen=True)
class BucketEntry:
    """One parameter: this rank's slices of it, and the outputs of each rank of the group."""

    param: Param
    slices: tuple[HfSlice, ...]
    outputs: tuple[tuple[tuple[Output, ...], ...], ...]  # [rank of the group][slice]

    def flat(self, rank: int) -> list[Output]:
        """Return the outputs of all slices of a rank that have a dimension; the others need no
        transfer.
        """
        return [out for of_slice in self.outputs[rank] for out in of_slice]

    @property
    def shares_amax(self) -> bool:
        """True if the ranks hold different columns of rows that share one scale."""
        scale = self.outputs[0][0][-1]
        return (
            self.param.row.split is Split.row and len(self.outputs[0][0]) == 2 and scale.dim is None
        )


@dataclass(frozen=True)
class Bucket:
    jobs: tuple[BucketEntry, ...]
    group: Group
    rank: int
    size: int

    def sent_bytes(self, rank: int) -> int:
        outs = (out for job in self.jobs for out in job.flat(rank))
        return sum(out.part.nbytes for out in outs if out.dim is not None)


def make_buckets(
    model: Model,
    groups: ShardGroups,
    format: Format,
    ignore: Sequence[str],
    dtype: str,
    size_bytes: int,
) -> list[Bucket]:
    """Return the buckets: dense parameters first, then experts; within each kind all ranks of a
    group have the same buckets in the same order.

    Empty on ranks outside the first replica, whose weights represent all.
    """
    shape = model.shape
    layout = model.layout
    place = groups.place
    params = [param for param in stage_params(shape, layout, place) if not param.row.copy]
    buckets: list[Bucket] = []
    for expert, replica, group in (
        (False, place.dp, groups.tensor),
        (True, place.edp, groups.expert_tensor),
    ):
        own = [param for param in params if param.row.expert is expert and replica == 0]
        jobs: list[BucketEntry] = []
        filled = 0
        for param in own:
            size, rank = param.tensor_parallel(layout, place)
            of_ranks = [param.slices(shape, layout, Place(tp=r, etp=r)) for r in range(size)]
            split = param.row.split is not Split.replicated
            made = tuple(
                tuple(tuple(outputs(piece, format, ignore, dtype, split)) for piece in pieces)
                for pieces in of_ranks
            )
            jobs.append(BucketEntry(param, of_ranks[rank], made))
            filled += sum(out.tensor.nbytes for out in jobs[-1].flat(0))
            if filled >= size_bytes or param is own[-1]:
                buckets.append(Bucket(tuple(jobs), group, rank, size))
                jobs = []
                filled = 0
    return buckets


class Workspace:
    """Memory of buckets, kept from one sync to the next: new pages cost more than the copies."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}

    def take(self, slot: int, nbytes: int, device: torch.device) -> Tensor:
        buffer = self._buffers.get(slot)
        if buffer is None or len(buffer) < nbytes or buffer.device != device:
            buffer = self._buffers[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer[:nbytes]


def gather(
    bucket: Bucket,
    content: Sequence[list[Tensor] | None],
    workspace: Workspace,
    device: torch.device,
) -> list[Tensor]:
    """Send this rank's bytes to the group's first rank, which receives those of all others.

    Content is None if this rank has failed.
    """
    if bucket.size == 1:
        return []
    if bucket.rank == 0:
        received = [
            workspace.take(rank, bucket.sent_bytes(rank), device) for rank in range(1, bucket.size)
        ]
        bucket.group.gather(received[0][:0], received, 0)
        return received
    sent = workspace.take(0, bucket.sent_bytes(bucket.rank), device)
    at = 0
    for job, made in zip(bucket.jobs, content, strict=True):
        for index, out in enumerate(job.flat(bucket.rank)):
            if out.dim is None:
                continue
            if made is not None:
                sent[at : at + out.part.nbytes].copy_(as_bytes(made[index]))
            at += out.part.nbytes
    bucket.group.gather(sent, [], bucket.rank)
    return []


def full_tensors(
    bucket: Bucket, content: Sequence[list[Tensor]], received: Sequence[Tensor]
) -> NamedTensors:
    """Return the full tensors of the bucket, from the content of the group's first rank and the
    others' bytes.
    """
    at = [0] * bucket.size
    for job, made in zip(bucket.jobs, content, strict=True):
        outs = [job.flat(rank) for rank in range(bucket.size)]
        for index, (own, tensor) in enumerate(zip(outs[0], made, strict=True)):
            if own.dim is None or bucket.size == 1:
                yield own.tensor.name, tensor
                continue
            full = torch.empty(own.tensor.shape, dtype=tensor.dtype, device=tensor.device)
            _fill(full, own, tensor)
            for rank in range(1, bucket.size):
                out = outs[rank][index]
                part = out.part
                raw = received[rank - 1][at[rank] : at[rank] + part.nbytes]
                at[rank] += part.nbytes
                _fill(full, out, _typed(raw, tensor.dtype).view(part.shape))
            yield own.tensor.name, full


def _typed(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as elements; a view of wide elements must begin at a multiple of their size."""
    return (raw.clone() if raw.storage_offset() % dtype.itemsize else raw).view(dtype)


def _fill(full: Tensor, out: Output, part: Tensor) -> None:
    assert out.dim is not None
    at = 0
    for start, length in out.runs:
        full.narrow(out.dim, start, length).copy_(part.narrow(out.dim, at, length))
        at += length
