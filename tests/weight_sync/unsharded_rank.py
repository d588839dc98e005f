"""Learner rank of test_whole_source, in a module that a fresh process can import."""

from __future__ import annotations

from typing import Any

import torch
from push_rank import meet
from simulated import assert_same_bits, hf_config, local_parameters, quantized_whole, random_hf

from megatron_rl.config.schema import Format
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.weight_sync import wire
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.unsharded_source import UnshardedSource

CASES = {"stages": ("qwen3", Layout(pp=2)), "experts": ("qwen3_moe", Layout(dp=2, ep=2))}
VICTIM = "decoder.layers.3.mlp.linear_fc2.weight"  # of the second stage


def make(
    rank: int, family: str, layout: Layout
) -> tuple[UnshardedSource, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This rank's source with the scales of an FP8 cache, its shards, and what has to arrive."""
    shape = ModelShape.from_hf(hf_config(family))
    hf = random_hf(shape)
    place = list(layout.places())[rank]

    def seen() -> torch.Tensor:  # each rank has seen its own layers
        amax_L2 = torch.zeros(shape.layers, 2)
        amax_L2[rank::2] = torch.tensor([448.0, 896.0])
        return amax_L2

    scales = CacheScales(shape.layers, TorchGroup(), seen)
    model = Model(shape, layout, {})
    source = ShardSource(
        model, ShardGroups(place), Format.int8, bucket_bytes=20_000, cache_scales=scales
    )
    wanted = quantized_whole(hf, Format.int8)
    for layer in range(shape.layers):
        for kind, scale in (("k", 1.0), ("v", 2.0)):
            wanted[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([scale])
    return source, local_parameters(hf, shape, layout, place), wanted


def run_case(rank: int, family: str, layout: Layout, everywhere: bool) -> dict[str, Any]:
    shard_source, shards, wanted = make(rank, family, layout)
    whole = UnshardedSource(shard_source, everywhere)
    metas = [(each.name, each.dtype, each.shape) for each in whole.tensors]
    passes = []
    for _ in range(2):  # each sync is a pass of its own
        whole.begin(shards)
        received = [(name, tensor.clone()) for name, tensor in whole]
        passes.append(len(received))
        if received:
            assert_same_bits(received, wanted)
            assert tuple(TensorSpec.of(name, tensor) for name, tensor in received) == whole.tensors
            sums = {name: wire.checksum(tensor) for name, tensor in wanted.items()}
            assert wire.read_checksums(whole.sums) == wire.read_checksums(sums)
    return {"metas": metas, "passes": passes}


def run_rank(rank: int, rendezvous: str) -> dict[str, Any]:
    meet(rank, rendezvous)
    found = {}
    for name, (family, layout) in CASES.items():
        for everywhere in (False, True):
            found[f"{name} {everywhere}"] = run_case(rank, family, layout, everywhere)
    source, shards, _ = make(rank, *CASES["stages"])
    whole = UnshardedSource(source, everywhere=False)
    whole.begin(shards)
    taken = next(iter(whole), None)  # rank 0 gives up after the first
    whole.drain()
    found["interrupted"] = [taken is not None, source.failure]
    if rank == 1:
        shards[VICTIM] = shards[VICTIM].clone().fill_(torch.nan)
    whole.begin(shards)
    found["diverged"] = [len(list(whole)), source.failure]
    return found
