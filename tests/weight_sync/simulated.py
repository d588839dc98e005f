"""A learner's ranks as threads of this process: real shards, the collectives done over a barrier.

Also the toy shapes of every family that the tests share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import params, stage_params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.shards import ShardGroups, local_shard
from megatron_rl.quantization.formats import is_quantized
from megatron_rl.quantization.quantize import quantize
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.weight_sync.source import ShardSource

TIMEOUT_S = 120.0


class ThreadGroup:
    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=TIMEOUT_S)
        self._slots: dict[int, torch.Tensor] = {}
        self.sent: dict[int, int] = {}  # bytes by rank

    def max_(self, tensor: torch.Tensor) -> None:
        self._slots[threading.get_ident()] = tensor.clone()
        self._barrier.wait()
        tensor.copy_(torch.stack(list(self._slots.values())).amax(0))
        if self._barrier.wait() == 0:
            self._slots.clear()
        self._barrier.wait()

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor], rank: int) -> None:
        self._slots[rank] = tensor
        self.sent[rank] = self.sent.get(rank, 0) + (tensor.nbytes if rank else 0)
        self._barrier.wait()
        for source, buffer in enumerate(received, start=1):
            buffer.copy_(self._slots[source])
        if self._barrier.wait() == 0:
            self._slots.clear()
        self._barrier.wait()


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    config = {
        "model_type": family,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 101,
        "tie_word_embeddings": False,
    }
    if family == "qwen3_moe":
        config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if family == "mixtral":
        config |= {"num_local_experts": 2, "num_experts_per_tok": 2}
    return config | changes


def random_hf(
    shape: ModelShape, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(size, generator=generator).to(dtype)
        for param in params(shape)
        for name, size in param.sizes.items()
    }


def quantized_whole(
    hf: Mapping[str, torch.Tensor], format: Format, ignore: Sequence[str] = ("lm_head",)
) -> dict[str, torch.Tensor]:
    """Tensors that a sampler must receive: every original one, quantized in one piece."""
    out = {}
    for name, tensor in hf.items():
        if is_quantized(name, format, ignore):
            for suffix, value in quantize(tensor, format).items():
                out[name.removesuffix("weight") + suffix] = value
        else:
            out[name] = tensor.bfloat16()
    return out


def assert_same_bits(
    received: Sequence[tuple[str, torch.Tensor]], want: Mapping[str, torch.Tensor]
) -> None:
    assert sorted(name for name, _ in received) == sorted(want)  # each once
    for name, tensor in received:
        assert (tensor.dtype, tensor.shape) == (want[name].dtype, want[name].shape), name
        assert torch.equal(_bits(tensor), _bits(want[name])), name


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def local_parameters(
    hf: Mapping[str, torch.Tensor], shape: ModelShape, layout: Layout, place: Place
) -> dict[str, torch.Tensor]:
    return {
        param.megatron: local_shard(param.megatron, shape, layout, place, hf.__getitem__)
        for param in stage_params(shape, layout, place)
    }


def run_sources(
    hf: Mapping[str, torch.Tensor],
    shape: ModelShape,
    layout: Layout,
    format: Format,
    *,
    groups: dict[Any, ThreadGroup] | None = None,
    smoothing: Callable[[Place, ThreadGroup], Smoothing] | None = None,
    **source_args: Any,
) -> tuple[list[ShardSource], list[list[tuple[str, torch.Tensor]]]]:
    """Every rank's source, and what each yielded. `groups`: filled with the groups they talked
    over.
    """
    groups = {} if groups is None else groups
    sources = []
    work = []
    world = groups.setdefault("world", ThreadGroup(layout.world))
    for place in layout.places():
        dense = groups.setdefault(("tp", place.pp, place.dp), ThreadGroup(layout.tp))
        expert = groups.setdefault(
            ("etp", place.pp, place.ep, place.edp), ThreadGroup(layout.expert_tp)
        )
        ranks = ShardGroups(place, dense, expert, world)
        smooth = smoothing(place, world) if smoothing else None
        sources.append(
            ShardSource(Model(shape, layout, {}), ranks, format, smoothing=smooth, **source_args)
        )
        work.append(local_parameters(hf, shape, layout, place))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # every rank would start a team of its own
    try:
        with ThreadPoolExecutor(len(sources)) as pool:
            futures = [
                pool.submit(lambda s=source, p=part: list(s.tensors(p)))
                for source, part in zip(sources, work, strict=True)
            ]
            return sources, [future.result(timeout=TIMEOUT_S * 2) for future in futures]
    finally:
        torch.set_num_threads(threads)
