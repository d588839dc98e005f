"""Where the parts of a rank's shard lie in the whole tensors of a checkpoint. Pure integers.

A checkpoint keeps each parameter as one rank alone would hold it; a learner of any layout writes its blocks of that,
and reads others. The distributed optimizer keeps a contiguous run of each flattened shard: a few blocks, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param
from megatron_rl.models.table import Split

Box = tuple[tuple[int, ...], tuple[int, ...]]  # from where, and how long, on each axis


@dataclass(frozen=True)
class Region:
    """A block: `size` long from `start` in the shard, from `offset` in the whole tensor; one number for each axis."""

    start: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]


def shard_regions(param: Param, layout: Layout, place: Place) -> list[Region]:
    """The blocks that make up the rank's whole shard. Rows that only pad the vocabulary are in none."""
    local = param.local_shape(layout)
    zeros = (0,) * len(local)
    split = param.row.split
    size, rank = param.tensor_parallel(layout, place)
    if split is Split.replicated:
        return [Region(zeros, zeros, local)]
    if split is Split.gate_up:  # the whole has all gates, then all ups; a shard its share of each
        each = local[0] // 2
        parts = [(half * each, (half * size + rank) * each, each) for half in range(2)]
    else:
        axis_length = local[split is Split.row]
        whole = param.shapes[0][0] if split is Split.vocab else size * axis_length
        parts = [(0, rank * axis_length, min(axis_length, whole - rank * axis_length))]
    axis = int(split is Split.row)
    return [
        Region(_at(zeros, axis, start), _at(zeros, axis, offset), _at(local, axis, length))
        for start, offset, length in parts
        if length > 0
    ]


def run_regions(regions: list[Region], local: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Region]]:
    """Of elements [start, stop) of the flattened shard: (where the block begins in the run, the block).

    The elements of each block lie one after the other in the run.
    """
    at = 0
    for box_start, box_size in _boxes(local, start, stop):
        for region in regions:
            low = tuple(map(max, box_start, region.start))
            high = (
                min(b + n, r + m) for b, n, r, m in zip(box_start, box_size, region.start, region.size, strict=True)
            )
            size = tuple(h - lo for h, lo in zip(high, low, strict=True))
            if min(size) <= 0:
                continue
            offset = tuple(o + lo - r for o, lo, r in zip(region.offset, low, region.start, strict=True))
            inside = sum((lo - b) * prod(box_size[axis + 1 :]) for axis, (lo, b) in enumerate(zip(low, box_start)))  # noqa: B905
            yield at + inside, Region(low, offset, size)
        at += prod(box_size)


def common(one: Box, other: Box) -> Box | None:
    """The block that two blocks of a tensor share; None where they share nothing."""
    low = tuple(map(max, one[0], other[0]))
    high = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    size = tuple(h - lo for h, lo in zip(high, low, strict=True))
    return (low, size) if min(size, default=1) > 0 else None


def _boxes(size: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A run of a flattened tensor as blocks (start, size), in the order of the run."""
    if start >= stop:
        return
    if len(size) == 1:
        yield (start,), (stop - start,)
        return
    inner = prod(size[1:])
    row, within = divmod(start, inner)
    if within or stop - start < inner:
        end = min(stop, (row + 1) * inner)
        for at, length in _boxes(size[1:], within, end - row * inner):
            yield (row, *at), (1, *length)
        yield from _boxes(size, end, stop)
        return
    rows = (stop - start) // inner
    yield (row, *(0 for _ in size[1:])), (rows, *size[1:])
    yield from _boxes(size, (row + rows) * inner, stop)


def _at(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])
