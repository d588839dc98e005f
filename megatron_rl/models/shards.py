"""Tensors through the mapping table: full Hugging Face tensors to a rank's megatron shard, and back.

Pure torch, no process group. O output rows, I input columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from megatron_rl.models import memory
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import HfSlice, Param, Span, find
from megatron_rl.models.shape import ModelShape


def local_shard(
    name: str, shape: ModelShape, layout: Layout, place: Place, get_hf: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """The shard of megatron parameter `name` (global numbers) that the rank at `place` starts from.

    `get_hf(name)` returns a full Hugging Face tensor; rows that pad the vocabulary are zero.
    """
    param = find(name, shape)
    return assemble(param, shape, layout, place, [_checked(get_hf(hf), hf, full) for hf, full in _full(param)])


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
            local = memory.empty(param.local_shape(layout), full.dtype)
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


def _full(param: Param) -> list[tuple[str, tuple[int, ...]]]:
    return list(zip(param.hf, param.shapes, strict=True))


def _checked(tensor: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, config.json says {shape}")
    return tensor
