"""Each rank's own quantized shards, ungathered: what a transport needs that reshards by itself (`nccl_m2n`).

Every replica takes part, so the rank at any data-parallel place behaves as the one of the first replica does. One
mesh describes the whole model, hence no pipeline or expert parallelism, and shards must be equal and contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.wire import TensorMeta


class ShardStream:
    def __init__(self, source: ShardSource) -> None:
        self.source = source = source.as_first_replica()
        layout = source.layout
        if layout.pp > 1 or layout.ep > 1:
            raise WeightSyncError(
                f"sync.transport=nccl_m2n with learner.pipeline_parallel={layout.pp} and "
                f"learner.expert_parallel={layout.ep}: it knows one mesh for all weights; use nccl"
            )
        self.shards, self.replicas = layout.tp, layout.world // layout.tp
        self.sums: dict[str, torch.Tensor] = {}
        self.dims: dict[str, int | None] = {}  # along which a tensor is shared; None: every rank has all of it
        tensors: list[TensorMeta] = []
        for part in source.own_outputs:
            uneven = part.dim is not None and (
                len(part.runs) != 1 or part.part_shape[part.dim] * self.shards != part.shape[part.dim]
            )
            if uneven:
                raise WeightSyncError(
                    f"sync.transport=nccl_m2n: {part.name} {part.shape} has no equal contiguous shares over "
                    f"learner.tensor_parallel={self.shards}; use nccl"
                )
            self.dims[part.name] = part.dim if self.shards > 1 else None
            tensors.append(TensorMeta(part.name, part.dtype, part.shape))
        self.tensors = tuple(tensors)
        self._pass: Iterator[tuple[str, torch.Tensor]] = iter(())

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._pass = self.source.own_shards(parameters)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._pass

    def drain(self) -> None:
        for _ in self._pass:
            pass
