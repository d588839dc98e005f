"""Shards of an engine's ranks: how a writer partitions a tensor for them, which parts a rank loads,
and their storage (`ShardBuffer`).

An engine of several tensor-parallel ranks reads each byte of a partitioned tensor once instead of
once per rank: a writer stores the tensor part by part, each with a checksum, and a rank reads the
parts that overlap its shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_rl.models.tensors import Runs, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PADDED_VOCAB = 64  # vLLM pads a vocabulary to a multiple of this before sharding it
SMALL = 1 << 14  # bytes below which a tensor is not partitioned


@dataclass(frozen=True)
class ShardLayout:
    """Order in which a writer stores a tensor: these rows (columns) one after the other."""

    dim: int
    runs: Runs

    @classmethod
    def of(
        cls, spec: TensorSpec, dim: int, kinds: Sequence[int], vocabulary: bool, ranks: int
    ) -> ShardLayout:
        """Return equal shares for `ranks` of each of the `kinds` of rows (queries, keys, ...) in a
        tensor.
        """
        unit = PADDED_VOCAB if vocabulary else 1
        at = 0
        runs = []
        # rows per block of a block scale
        blocks, uneven = divmod(sum(kinds), spec.shape[dim])
        if uneven:
            lengths = [spec.shape[dim]]
        else:
            lengths = [rows // blocks for rows in kinds]
        for length in lengths:
            step = -(-length // unit) * unit // ranks or length
            runs += [(at + start, min(step, length - start)) for start in range(0, length, step)]
            at += length
        return cls(dim, tuple(runs))


@dataclass(frozen=True)
class Shard:
    """Part of a tensor that one rank of an engine loads; without runs, all of it."""

    dim: int = 0
    runs: Runs | None = None

    def needs(self, dim: int, start: int, length: int) -> bool:
        """True if this rank loads any of these rows (columns)."""
        if self.runs is None or (self.runs and self.dim != dim):
            return True
        return any(first < start + length and start < first + own for first, own in self.runs)

    def take(self, tensor: Tensor) -> list[Tensor]:
        """Copy this rank's part of a full tensor."""
        if self.runs is None:
            return [tensor.clone()]
        return [tensor.narrow(self.dim, start, length).clone() for start, length in self.runs]

    def spread(self, taken: Sequence[Tensor], spec: TensorSpec) -> Tensor:
        """Return a tensor of the full shape, for loaders that cut their shard; other values are
        undefined.
        """
        if self.runs is None:
            return taken[0]
        if not self.runs:
            return taken[0].expand(spec.shape)
        whole = taken[0].new_empty(spec.shape)
        for (start, length), part in zip(self.runs, taken, strict=True):
            whole.narrow(self.dim, start, length).copy_(part)
        return whole


WHOLE = Shard()
NOTHING = Shard(runs=())


class ShardBuffer(Mapping[str, "Tensor"]):
    """Verified tensors of one rank, kept until they are loaded: only its shards are stored, and
    expanded to the full shape at each access.
    """

    def __init__(self, shards: Mapping[str, Shard]) -> None:
        self._shards = shards
        self._taken: dict[str, tuple[TensorSpec, list[Tensor]]] = {}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> ShardBuffer:
        held = cls(shards)
        for name, tensor in tensors.items():
            held.take(name, tensor, own=True)
        return held

    def take(self, name: str, tensor: Tensor, own: bool = False) -> None:
        """Store this rank's part of a full tensor. `own`: the tensor is not written to later."""
        shard = self._shards.get(name, WHOLE)
        parts = [tensor] if own and shard == WHOLE else shard.take(tensor)
        self._taken[name] = (TensorSpec.of(name, tensor), parts or [tensor.new_empty(1)])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for _, parts in self._taken.values() for part in parts)

    def move(self, device: torch.device) -> None:
        self._taken = {
            name: (spec, [part.to(device) for part in parts])
            for name, (spec, parts) in self._taken.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        spec, parts = self._taken[name]
        return self._shards.get(name, WHOLE).spread(parts, spec)

    def __iter__(self) -> Iterator[str]:
        return iter(self._taken)

    def __len__(self) -> int:
        return len(self._taken)
