"""A rank's shards: cut from Hugging Face tensors and back, LoRA merged, groups that share them,
blocks in checkpoints.

A checkpoint keeps each parameter as one rank alone would hold it; a learner of any layout writes
its blocks of that, and reads others. The distributed optimizer keeps a contiguous run of each
flattened shard: a few blocks, too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_rl.distributed import Group, TorchGroup
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import HfSlice, Param, Span, find
from megatron_rl.models.shape import ADAPTER, ModelShape
from megatron_rl.models.table import Split

# FP32 values that are merged at once: what stays in a cache
HELD = {
    "cpu": 1 << 18,
    "cuda": 1 << 25,
}
Axes = tuple[int, ...]  # a number for each
Box = tuple[Axes, Axes]  # from where, and how long, on each axis


@dataclass(frozen=True)
class ShardGroups:
    """This rank's place in the layout, and the groups that share a dense weight, an expert, or
    anything at all.
    """

    place: Place = field(default_factory=Place)
    tensor: Group = field(default_factory=TorchGroup)
    expert_tensor: Group = field(default_factory=TorchGroup)
    world: Group = field(default_factory=TorchGroup)


def local_shard(
    name: str,
    shape: ModelShape,
    layout: Layout,
    place: Place,
    get_hf: Callable[[str], Tensor],
) -> Tensor:
    """The shard of megatron parameter `name` (global numbers) that the rank at `place` starts from.

    `get_hf(name)` returns a full Hugging Face tensor; rows that pad the vocabulary are zero.
    """
    param = find(name, shape)
    full = [_checked(get_hf(hf), hf, size) for hf, size in param.sizes.items()]
    return assemble(param, shape, layout, place, full)


def assemble(
    param: Param, shape: ModelShape, layout: Layout, place: Place, tensors: Iterable[Tensor]
) -> Tensor:
    """Cut the shard out of the full tensors behind `param`, in the order of `param.hf`."""
    local: Tensor | None = None
    pieces = param.slices(shape, layout, place)
    for piece, full in zip(pieces, tensors, strict=True):
        if piece.spans == (Span(0, 0, full.shape[piece.dim]),) and tuple(
            full.shape
        ) == param.local_shape(layout):
            return full  # all of it, as it lies
        if local is None:
            local = torch.empty(param.local_shape(layout), dtype=full.dtype)
            if sum(math.prod(one.local_shape) for one in pieces) < local.numel():
                local.zero_()
        for span in piece.spans:
            target = local.narrow(piece.dim, span.local, span.length)
            target.copy_(full.narrow(piece.dim, span.full, span.length))
        del full  # before the next one is read
    assert local is not None
    return local


def cut(param: Param, local: Tensor, slices: tuple[HfSlice, ...]) -> list[tuple[HfSlice, Tensor]]:
    """Cut a shard into its parts of Hugging Face tensors, each with its slice."""
    out = []
    for piece in slices:
        if len(piece.spans) == 1:
            part = local.narrow(piece.dim, piece.spans[0].local, piece.length)
        elif piece.spans:
            part = torch.cat(
                [local.narrow(piece.dim, span.local, span.length) for span in piece.spans],
                piece.dim,
            )
        else:
            part = local.new_empty(piece.local_shape)
        out.append((piece, part))
    return out


def row_numbers(
    kinds: Iterable[Iterable[Span]], device: torch.device | None = None
) -> list[Tensor]:
    """The rows of a shard that each of its kinds has, of their spans (mapping.adapted_rows)."""
    runs = [[torch.arange(span.local, span.local + span.length) for span in kind] for kind in kinds]
    return [torch.cat([torch.arange(0), *of_kind]).to(device) for of_kind in runs]


def merge(
    weight_NK: Tensor,
    a: Tensor,
    b_NR: Tensor,
    rows: Sequence[Tensor],
    scale: float,
) -> Tensor:
    """The weight with its adapter, rounded once to its own precision.

    `rows`: of each tensor that Hugging Face keeps apart, whose A's are stacked in `a`. Products are
    summed over the rank one after the other, in FP32, by operations that round each element by
    itself: a product of matrices would sum in an order that depends on the shape of the shard.
    """
    merged = weight_NK.clone()
    rank = b_NR.shape[1]
    wide_a = a.float()
    wide_b = b_NR.float()
    step = max(1, HELD[weight_NK.device.type] // weight_NK.shape[1])
    for kind, rows_n in enumerate(rows):
        mine = wide_a[kind * rank : (kind + 1) * rank]
        for some_n in rows_n.split(step):
            sum_nK = torch.zeros((len(some_n), weight_NK.shape[1]), device=weight_NK.device)
            product_nK = torch.empty_like(sum_nK)
            factors_nR = wide_b[some_n]
            for place in range(rank):
                torch.mul(factors_nR[:, place, None], mine[place], out=product_nK)
                sum_nK.add_(product_nK)
            merged[some_n] = sum_nK.mul_(scale).add_(weight_NK[some_n].float()).to(merged.dtype)
    return merged


def _checked(tensor: Tensor, name: str, shape: Axes) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, config.json says {shape}")
    return tensor


@dataclass(frozen=True)
class Region:
    """A block: `size` long from `start` in the shard, from `offset` in the whole tensor; one number
    for each axis.
    """

    start: Axes
    offset: Axes
    size: Axes


def shard_regions(param: Param, layout: Layout, place: Place) -> list[Region]:
    """Blocks that make up the rank's whole shard, without the vocabulary's padding rows."""
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
        if split is Split.vocab:
            whole = param.shapes[0][0]
        else:
            whole = size * axis_length
        parts = [(0, rank * axis_length, min(axis_length, whole - rank * axis_length))]
    axis = int(split is Split.row)
    return [
        Region(
            _at(zeros, axis, start),
            _at(zeros, axis, offset),
            _at(local, axis, length),
        )
        for start, offset, length in parts
        if length > 0
    ]


def run_regions(
    regions: list[Region], local: Axes, start: int, stop: int
) -> Iterator[tuple[int, Region]]:
    """Blocks that make up elements [start, stop) of the flattened shard, each with its place there.

    The elements of each block lie one after the other in the run.
    """
    at = 0
    for box in _boxes(local, start, stop):
        for region in regions:
            shared = common(box, (region.start, region.size))
            if shared is None:
                continue
            low, size = shared
            offset = tuple(
                o + lo - r for o, lo, r in zip(region.offset, low, region.start, strict=True)
            )
            inside = sum(
                (lo - b) * math.prod(box[1][axis + 1 :])
                for axis, (lo, b) in enumerate(zip(low, box[0], strict=False))
            )
            yield at + inside, Region(low, offset, size)
        at += math.prod(box[1])


def common(one: Box, other: Box) -> Box | None:
    """The block that two blocks of a tensor share; None where they share nothing."""
    low = tuple(map(max, one[0], other[0]))
    high = (min(a + n, b + m) for a, n, b, m in zip(*one, *other, strict=True))
    size = tuple(h - lo for h, lo in zip(high, low, strict=True))
    if min(size, default=1) > 0:
        return (low, size)
    return None


def part(tensor: Tensor, start: Iterable[int], size: Iterable[int]) -> Tensor:
    """Return the block of a tensor that begins at `start`, a view."""
    for axis, (at, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(axis, at, length)
    return tensor


def _boxes(size: Axes, start: int, stop: int) -> Iterator[Box]:
    """A run of a flattened tensor as blocks (start, size), in the order of the run."""
    if start >= stop:
        return
    if len(size) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(size[1:])
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


def _at(values: Axes, axis: int, value: int) -> Axes:
    return (*values[:axis], value, *values[axis + 1 :])


def weight_names(layer: Any) -> list[str]:
    """Names of a layer's weights: one, or one of each of its experts."""
    return [name for name, _ in layer.named_parameters(recurse=False) if name.startswith("weight")]


def merged_weight(layer: Any, name: str = "weight") -> Tensor:
    """A layer's weight as a sync sends it."""
    weight = getattr(layer, name).detach()
    adapter = layer._modules.get(ADAPTER)
    if adapter is None:
        return weight
    return adapter.merged(weight, name.removeprefix("weight"))
