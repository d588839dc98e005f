"""Fake-quantized forward passes of Transformer Engine's linear layers: a correct engine's logprobs.

Weights are quantized as a sync quantizes them, inputs per token as vLLM's kernels do. INT8 and FP8
codes are exact in BF16; their products are summed in FP32, then scaled. Nothing is kept longer than
a layer's turn: a second copy of all weights has no room beside an optimizer. Without gradients.

M tokens, K input features and N output features of this rank, S input slices, one per engine rank.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.learner.modules.linear import add_over_ranks, amax_of_slices, wide_product
from megatron_rl.learner.modules.observers import fused_norm
from megatron_rl.models.mapping import Param, find, global_name
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups, merged_weight, weight_names
from megatron_rl.models.table import Split
from megatron_rl.quantization.cpu_matmul import Fp8Weight, Int8Weight
from megatron_rl.quantization.formats import QUANTIZED, is_quantized
from megatron_rl.quantization.quantize import quantize, row_amax
from megatron_rl.quantization.smoothing import Smoothing, folded

ROWS = 4096  # of tokens, whose outputs are held in FP32 at once


@dataclass(frozen=True)
class Rounding:
    """Settings of the engine whose rounding is imitated."""

    format: Format
    ignore: tuple[str, ...]
    tensor_parallel: int


@contextmanager
def fake_quantized(
    modules: Iterable[tuple[int, Any]],
    model: Model,
    groups: ShardGroups,
    engine: Rounding,
    smoothing: Smoothing | None,
) -> Iterator[None]:
    """Until it ends, layers that the engine holds quantized compute as it does. `modules`: with
    their first layers.
    """
    first_expert = model.layout.local_experts(model.shape.experts, groups.place.ep).start
    replaced = []
    try:
        for first_layer, module in modules:
            for name, layer in module.named_modules():
                own = weight_names(layer)
                if not own or not hasattr(layer, "te_return_bias"):
                    continue
                params = [
                    find(global_name(f"{name}.{weight}", first_layer, first_expert), model.shape)
                    for weight in own
                ]
                if all(
                    is_quantized(hf, engine.format, engine.ignore)
                    for param in params
                    for hf in param.hf
                ):
                    weights = tuple(zip(own, params, strict=True))
                    layer.forward = partial(
                        _forward, _Imitated(layer, weights, model, groups, engine, smoothing)
                    )
                    replaced.append(layer)
        yield
    finally:
        for layer in replaced:
            del layer.forward  # what its class says


@dataclass(frozen=True)
class _Imitated:
    layer: Any
    weights: tuple[tuple[str, Param], ...]  # several: experts
    model: Model
    groups: ShardGroups
    engine: Rounding
    smoothing: Smoothing | None


@torch.no_grad()
def _forward(
    one: _Imitated, input: Tensor, m_splits: list[int] | None = None
) -> tuple[Tensor, Tensor | None]:
    layer = one.layer
    if hasattr(layer, "layer_norm_weight"):
        rows = fused_norm(layer, input).to(input.dtype)
    else:
        rows = input
    if layer.sequence_parallel and layer.parallel_mode == "column":
        rows = gather_from_sequence_parallel_region(rows, group=layer._tp_group)
    flat_MK = rows.flatten(0, -2)
    parts = flat_MK.split(m_splits) if m_splits is not None else (flat_MK,)
    outs = [
        _product(one, name, param, x_MK)
        for (name, param), x_MK in zip(one.weights, parts, strict=True)
    ]
    out = torch.cat(outs).view(*rows.shape[:-1], -1)  # rounded: what ranks of an engine add is
    if layer.parallel_mode == "row":
        out = add_over_ranks(out, layer.sequence_parallel, layer._tp_group)
    return out, None


def _product(one: _Imitated, name: str, param: Param, x_MK: Tensor) -> Tensor:
    """Product of the inputs with one weight, both rounded as the engine does."""
    weight_NK = merged_weight(one.layer, name)
    if one.smoothing is not None and (calm_K := one.smoothing.scale_of(param)) is not None:
        x_MK = x_MK / calm_K.to(x_MK)
        weight_NK = folded(weight_NK, calm_K)
    ranks = 1
    mine = 0
    slices = 1
    amax_N = None
    if param.row.expert:
        group = one.groups.expert_tensor
    else:
        group = one.groups.tensor
    if param.row.split is Split.row:
        ranks, mine = param.tensor_parallel(one.model.layout, one.groups.place)
        slices = one.engine.tensor_parallel
        if ranks > 1:
            amax_N = row_amax(weight_NK)
            group.max_(amax_N)
    made = quantize(weight_NK, one.engine.format, amax_N)
    codes_NK = made["weight"].to(torch.bfloat16)
    scale_N1 = made["weight_scale"]
    kind = Int8Weight if QUANTIZED[one.engine.format].integer else Fp8Weight
    here = max(1, slices // ranks)
    out_MN = x_MK.new_empty((len(x_MK), len(weight_NK)))
    for rows_MK, out in zip(x_MK.split(ROWS), out_MN.split(ROWS), strict=True):
        wide_MN = None
        for some_MK, some_NK in zip(rows_MK.chunk(here, 1), codes_NK.chunk(here, 1), strict=True):
            amax_M1 = None
            if slices < ranks:  # several ranks hold parts of one slice
                slice_here = mine * slices // ranks
                amax_M1 = amax_of_slices(some_MK, slices, slice_here, group.max_)[slice_here]
            codes_MK, scale_M1 = kind.codes(some_MK, amax_M1)
            part_MN = wide_product(codes_MK.to(torch.bfloat16), some_NK).mul_(scale_M1)
            wide_MN = part_MN if wide_MN is None else wide_MN.add_(part_MN)
        assert wide_MN is not None
        wide_MN.mul_(scale_N1.t())
        out.copy_(wide_MN.add_(one.layer.bias) if one.layer.use_bias else wide_MN)
    return out_MN
