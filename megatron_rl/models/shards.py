"""A rank's shards: who shares them, and how full Hugging Face tensors become a megatron shard, and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_rl.distributed import Group, TorchGroup
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import HfSlice, Param, Span, find
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import empty_tensor


@dataclass(frozen=True)
class ShardGroups:
    """This rank's place in the layout, and the groups that share a dense weight, an expert, or anything at all."""

    place: Place = field(default_factory=Place)
    tensor: Group = field(default_factory=TorchGroup)
    expert_tensor: Group = field(default_factory=TorchGroup)
    world: Group = field(default_factory=TorchGroup)


def local_shard(
    name: str, shape: ModelShape, layout: Layout, place: Place, get_hf: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """The shard of megatron parameter `name` (global numbers) that the rank at `place` starts from.

    `get_hf(name)` returns a full Hugging Face tensor; rows that pad the vocabulary are zero.
    """
    param = find(name, shape)
    full = [_checked(get_hf(hf), hf, size) for hf, size in zip(param.hf, param.shapes, strict=True)]
    return assemble(param, shape, layout, place, full)


def assemble(
    param: Param, shape: ModelShape, layout: Layout, place: Place, tensors: Iterable[torch.Tensor]
) -> torch.Tensor:
    """Cut the shard out of the full tensors behind `param`, in the order of `param.hf`."""
    local: torch.Tensor | None = None
    pieces = param.slices(shape, layout, place)
    for piece, full in zip(pieces, tensors, strict=True):
        if piece.spans == (Span(0, 0, full.shape[piece.dim]),) and tuple(full.shape) == param.local_shape(layout):
            return full  # all of it, as it lies
        if local is None:
            local = empty_tensor(param.local_shape(layout), full.dtype)
            if sum(math.prod(one.local_shape) for one in pieces) < local.numel():
                local.zero_()
        for span in piece.spans:
            target = local.narrow(piece.dim, span.local, span.length)
            target.copy_(full.narrow(piece.dim, span.full, span.length))
        del full  # before the next one is read
    assert local is not None
    return local


def cut(param: Param, local: torch.Tensor, slices: tuple[HfSlice, ...]) -> list[tuple[HfSlice, torch.Tensor]]:
    """The inverse for one shard: each Hugging Face tensor's part of it, and where that part lies."""
    out = []
    for piece in slices:
        if len(piece.spans) == 1:
            part = local.narrow(piece.dim, piece.spans[0].local, piece.length)
        elif piece.spans:
            part = torch.cat([local.narrow(piece.dim, span.local, span.length) for span in piece.spans], piece.dim)
        else:
            part = local.new_empty(piece.local_shape)
        out.append((piece, part))
    return out


def full_tensors(hf: Mapping[str, torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """`get_hf` over tensors already in memory."""

    def get(name: str) -> torch.Tensor:
        if name not in hf:
            raise KeyError(f"the Hugging Face weights lack {name}")
        return hf[name]

    return get


def _checked(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, config.json says {shape}")
    return tensor
