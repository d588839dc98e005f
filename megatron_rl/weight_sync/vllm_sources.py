"""Our sources in the shape that vLLM's trainer engines ask for. Imported by `vllm_push` alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.m2n_common import REPLICATE, REPLICATED, M2NMesh, M2NParamMeta, Placements
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from megatron_rl.config.schema import Transport
from megatron_rl.weight_sync import wire
from megatron_rl.weight_sync.manifest import DTYPES
from megatron_rl.weight_sync.shard_stream import ShardStream
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.whole_source import WholeSource
from megatron_rl.weight_sync.wire import TensorMeta


class WholeTensors(WeightSource):
    """`WholeSource` as vLLM asks for it."""

    def __init__(self, source: WholeSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(each.name, DTYPES[each.dtype], each.shape) for each in self._source.tensors]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


class ShardedTensors(M2NWeightSource):
    """`ShardStream` as vLLM's m2n engine asks for it: each rank's quantized shard, and how the ranks share a tensor."""

    def __init__(self, source: ShardStream) -> None:
        self._source = source

    def mesh(self) -> M2NMesh:
        return M2NMesh((self._source.replicas, self._source.shards), 0)

    def metadata(self) -> list[ParamMeta]:
        return [
            M2NParamMeta(each.name, DTYPES[each.dtype], each.shape, placements(self._source.dims[each.name]))
            for each in self._source.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


def placements(dim: int | None) -> Placements | None:
    """Axis 0 of the mesh holds replicas, axis 1 the tensor-parallel ranks."""
    return REPLICATED if dim is None else (REPLICATE, dim)


class Stream:
    """One of the two sources, whichever the transport sends from."""

    def __init__(self, source: WholeSource | ShardStream, vllm: WeightSource, checksummed: bool) -> None:
        self._source, self._vllm, self._checksummed = source, vllm, checksummed

    @property
    def source(self) -> ShardSource:
        return self._source.source

    @property
    def tensors(self) -> tuple[TensorMeta, ...]:
        return self._source.tensors

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._source.begin(parameters)

    def drain(self) -> None:
        self._source.drain()

    def checksums(self) -> dict[str, tuple[int, int]] | None:
        return wire.read_checksums(self._source.sums) if self._checksummed else None

    def for_vllm(self) -> WeightSource:
        return self._vllm


def open_stream(source: ShardSource, transport: Transport) -> Stream:
    if transport == Transport.nccl_m2n:
        shards = ShardStream(source)
        return Stream(shards, ShardedTensors(shards), checksummed=False)
    whole = WholeSource(source, everywhere=transport == Transport.ipc)
    return Stream(whole, WholeTensors(whole), checksummed=True)
