"""Megatron's torch_dist checkpoints through the mapping table: weights in, weights out.

Neither needs megatron or a process group: tensors come one at a time, in pieces of any shape, and any learner layout
can load what is written (torch_dist_writer.py). Nothing in a checkpoint is unpickled (torch_dist_index.py,
saved_tensor.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from pathlib import Path

import torch

from megatron_rl.checkpoint.torch_dist.index import CheckpointError, Chunk, Kept, read_index
from megatron_rl.checkpoint.torch_dist.places import Entry, entries, locate, misfit, prefix
from megatron_rl.checkpoint.torch_dist.saved_tensor import read_saved
from megatron_rl.checkpoint.torch_dist.writer import Block, part_of
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import Box, assemble, common, cut
from megatron_rl.models.tensors import TensorSpec, torch_dtype


def blocks(param: Param, shape: ModelShape, tensors: Iterable[torch.Tensor]) -> Iterator[Block]:
    """A whole parameter as a checkpoint holds it, from its Hugging Face tensors.

    In every spelling: Transformer Engine fuses some norms into the linear layer that follows.
    """
    local = assemble(param, shape, Layout(), Place(), tensors)
    for entry in entries(param, shape, stacked=not shape.dense_layers):
        yield part_of(entry, tuple(local.shape), (0,) * local.ndim, local)


class Reader:
    """Tensors of a torch_dist checkpoint by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors = read_index(folder)
        self._prefix = prefix(self._tensors)

    def find(self, param: Param, shape: ModelShape) -> Entry:
        entry = locate(self._tensors, self._prefix, param, shape)
        if entry is None:
            raise CheckpointError(f"{self.folder} lacks the parameter {param.megatron} ({param.hf[0]})")
        return entry

    def dtype(self, entry: Entry) -> str:
        return self._tensors[self._prefix + entry.key].dtype

    def parameter(self, param: Param, shape: ModelShape) -> list[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) for each tensor behind one parameter."""
        entry = self.find(param, shape)
        wanted = param.local_shape(Layout())
        if problem := misfit(self._tensors[self._prefix + entry.key], entry, param):
            raise CheckpointError(f"{entry.key} of {self.folder} {problem}")
        local = self.read(entry, (0,) * len(wanted), wanted)
        slices = param.slices(shape, Layout(), Place())
        return [(piece.name, part.contiguous()) for piece, part in cut(param, local, slices)]

    def read(self, entry: Entry, offset: tuple[int, ...], size: tuple[int, ...], kind: str = "") -> torch.Tensor:
        """A block of one parameter, or of what an optimizer keeps of it: `kind` is then optimizer.state.exp_avg."""
        key = f"{kind}{self._prefix}{entry.key}"
        if key not in self._tensors:
            raise CheckpointError(f"{self.folder} lacks {key}")
        kept = self._tensors[key]
        whole = (*(index for index, _ in entry.axes), *offset), (*(1 for _ in entry.axes), *size)
        shared = [(chunk, common(whole, (chunk.offset, chunk.size))) for chunk in kept.chunks]
        parts = [(chunk, box) for chunk, box in shared if box is not None]
        if any(common(one, other) for (_, one), (_, other) in combinations(parts, 2)):
            raise CheckpointError(f"{key} of {self.folder} holds a part of it twice")
        covered = sum(math.prod(length) for _, (_, length) in parts)
        if covered != math.prod(size):
            raise CheckpointError(f"{key} of {self.folder} is incomplete: {covered} of {math.prod(size)} values")
        if len(parts) == 1 and parts[0][0].size == whole[1]:
            return self._stored(key, kept, parts[0][0]).view(size)
        target = torch.empty(whole[1], dtype=torch_dtype(kept.dtype))
        for chunk, box in parts:
            _part(target, box, whole[0]).copy_(_part(self._stored(key, kept, chunk), box, chunk.offset))
        return target.view(size)

    def _stored(self, key: str, kept: Kept, chunk: Chunk) -> torch.Tensor:
        try:
            return read_saved(self.folder / chunk.file, chunk.begin, chunk.nbytes, kept.dtype, chunk.size)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{key} of {self.folder} cannot be read: {error}") from error


def _part(tensor: torch.Tensor, box: Box, origin: tuple[int, ...]) -> torch.Tensor:
    """The block of a tensor whose first element is `origin` of the whole."""
    for axis, (at, base, length) in enumerate(zip(box[0], origin, box[1], strict=True)):
        tensor = tensor.narrow(axis, at - base, length)
    return tensor


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of the model, in the order of `tensors`."""
    return {name: size for p in _own(shape) for name, size in zip(p.hf, p.shapes, strict=True)}


def specs(reader: Reader, shape: ModelShape) -> list[TensorSpec]:
    """The same, each with the dtype that the checkpoint holds it in."""
    found = []
    for param in _own(shape):
        dtype = reader.dtype(reader.find(param, shape))
        found += [TensorSpec(name, dtype, size) for name, size in zip(param.hf, param.shapes, strict=True)]
    return found


def tensors(reader: Reader, shape: ModelShape) -> Iterator[tuple[str, torch.Tensor]]:
    for param in _own(shape):
        yield from reader.parameter(param, shape)


def getter(reader: Reader, shape: ModelShape) -> Callable[[str], torch.Tensor]:
    """`get_hf` over a checkpoint. The tensors of a parameter are read at once, and kept until the next one's are."""
    behind = {name: param for param in _own(shape) for name in param.hf}
    kept: dict[str, torch.Tensor] = {}

    def get(name: str) -> torch.Tensor:
        if name not in kept:
            kept.clear()
            kept.update(reader.parameter(behind[name], shape))
        return kept[name]

    return get


def _own(shape: ModelShape) -> Iterator[Param]:
    return (param for param in params(shape) if not param.row.copy)
