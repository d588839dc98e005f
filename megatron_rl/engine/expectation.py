"""Expected tensors of a weight update (name, shape, dtype), and the shard of each that this rank
loads, from the layers of a live vLLM model; also the scales of an FP8 cache: their names, their
values, and 1 until the first sync.

Independent of the sender's mapping table on purpose: the two must agree, tensor by tensor, before
an update is accepted. Sizes are those of the complete model at any tensor parallelism of the
engine, because vLLM's loaders take complete tensors and cut their own shard. The shard of each is
determined here, so that nothing else has to be read.
"""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils.torch_utils import is_quantized_kv_cache

from megatron_rl.models.tensors import TensorSpec, dtype_name
from megatron_rl.quantization.formats import SCALE_DTYPE, scale_shape
from megatron_rl.weight_sync.engine_shards import NOTHING, WHOLE, Runs, Shard
from megatron_rl.weight_sync.manifest import WeightSyncError


def expected_tensors(
    model: torch.nn.Module, tied: bool
) -> tuple[dict[str, TensorSpec], dict[str, Shard]]:
    """Return the tensors that an update must contain, by Hugging Face name, and the shard of each
    that vLLM's loaders read on this rank.
    """
    found = {tensor.name: (tensor, shard) for tensor, shard in _tensors(model, tied)}
    return {name: tensor for name, (tensor, _) in found.items()}, {
        name: shard for name, (_, shard) in found.items()
    }


def _tensors(model: torch.nn.Module, tied: bool) -> Iterator[tuple[TensorSpec, Shard]]:
    fused_names: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            yield from _linear(name, module, fused_names)
        elif isinstance(module, RoutedExperts):
            yield from _experts(name, module)
        elif isinstance(module, Attention):
            # in a checkpoint the scales belong to the attention block
            owner = name.rpartition(".")[0]
            for scale in cache_scale_names(name, module):
                yield TensorSpec(f"{owner}.{scale.rpartition('.')[2]}", SCALE_DTYPE, (1,)), WHOLE
        elif isinstance(module, ParallelLMHead) and tied:
            continue
        elif isinstance(module, VocabParallelEmbedding):
            shape = (module.org_vocab_size, module.embedding_dim)
            own = module.shard_indices
            first = own.org_vocab_start_index
            end = own.org_vocab_end_index
            dtype = dtype_name(cast(torch.dtype, module.weight.dtype))
            yield TensorSpec(f"{name}.weight", dtype, shape), Shard(0, ((first, end - first),))
        else:
            for suffix, parameter in module.named_parameters(recurse=False):
                yield TensorSpec.of(f"{name}.{suffix}", parameter), WHOLE


def checkpoint_parameters(layer: torch.nn.Module) -> dict[str, Tensor]:
    """Return the layer's parameters in checkpoint layout (meta tensors that vLLM recorded before
    packing).
    """
    parameters, _ = get_layerwise_info(layer).restore_metadata
    return parameters


def cache_scale_names(name: str, layer: torch.nn.Module) -> list[str]:
    """Return vLLM's names of the key and value scale of an attention layer with a quantized
    cache.
    """
    quantized = isinstance(layer, Attention) and is_quantized_kv_cache(layer.kv_cache_dtype)
    if quantized:
        return [f"{name}.{scale}" for scale in ("k_scale", "v_scale")]
    return []


def neutral_cache_scales(model: Any) -> None:
    """Set the scales of a quantized cache to 1 until the first sync: vLLM's dummy weights make them
    random, and some negative.
    """
    for layer in (module for module in model.modules() if cache_scale_names("", module)):
        for kind in ("k", "v"):
            getattr(layer, f"_{kind}_scale").fill_(1.0)
            setattr(layer, f"_{kind}_scale_float", 1.0)


def cache_scales(model: Any) -> dict[str, tuple[float, float]]:
    """Return the (key, value) scale of every attention layer's cache, as its kernels read them; 1
    if it is not quantized.
    """
    scales = {
        name: (cast(Tensor, layer._k_scale), cast(Tensor, layer._v_scale))
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
    }
    # placeholders in the middle of vLLM's layerwise reload
    return {
        name: (float(k.max()), float(v.max())) for name, (k, v) in scales.items() if not k.is_meta
    }


def _linear(
    name: str, layer: Any, fused_names: dict[str, list[str]]
) -> Iterator[tuple[TensorSpec, Shard]]:
    parameters = checkpoint_parameters(layer)
    for part, kinds in _parts(name, layer, fused_names):
        rows = sum(kind.rows for kind in kinds)
        own = _one_after_the_other(kinds)
        for suffix, parameter in parameters.items():
            shape = _shape(name, suffix, rows, layer.input_size, layer)
            shard = Shard(0, _as_blocks(own, rows, shape[0]))
            if isinstance(layer, RowParallelLinear):
                shard = _columns(layer.tp_rank, layer.tp_size, shape)
            yield TensorSpec(f"{part}.{suffix}", dtype_name(parameter.dtype), shape), shard
        if layer.bias is not None:
            if isinstance(layer, RowParallelLinear):
                shard = WHOLE
            else:
                shard = Shard(0, own)
            yield TensorSpec(f"{part}.bias", dtype_name(layer.params_dtype), (rows,)), shard


def _experts(name: str, layer: RoutedExperts) -> Iterator[tuple[TensorSpec, Shard]]:
    """Add every expert's projections; the engine stacks gate and up of all its experts (w13), and
    down of all (w2).
    """
    moe = layer.moe_config
    hidden = moe.hidden_dim_unpadded
    inner = moe.intermediate_size
    assert hidden is not None
    gate = layer.ckpt_gate_proj_name
    up = layer.ckpt_up_proj_name
    down = layer.ckpt_down_proj_name
    stacked: dict[str, list[tuple[Any, int, int]]] = {
        "w13": [(gate, inner, hidden), (up, inner, hidden)],
        "w2": [(down, hidden, inner)],
    }
    own = ((moe.tp_rank * inner // moe.tp_size, inner // moe.tp_size),)
    # padded shards and replicated experts have other rules: such an engine loads complete tensors
    plain = not moe.tp_shard_with_padding and moe.num_experts == moe.num_logical_experts
    place_of = layer.expert_map_manager.map_global_to_local  # -1: on another rank
    # the checkpoint has the experts one level above their module
    owner = name.rpartition(".")[0]
    for parameter_name, parameter in checkpoint_parameters(layer).items():
        stack, _, suffix = parameter_name.partition("_")
        if stack not in stacked:
            raise WeightSyncError(
                f"the engine's layer {name} has a parameter {parameter_name} that no update carries"
            )
        for part, rows, columns in stacked[stack]:
            shape = _shape(name, suffix, rows, columns, layer)
            shard = Shard(0, _as_blocks(own, rows, shape[0]))
            if stack == "w2":
                shard = _columns(moe.tp_rank, moe.tp_size, shape)
            for expert in range(moe.num_logical_experts):
                tensor = TensorSpec(
                    f"{owner}.{expert}.{part}.{suffix}", dtype_name(parameter.dtype), shape
                )
                if not plain:
                    yield tensor, WHOLE
                elif place_of(expert) >= 0:
                    yield tensor, shard
                else:
                    yield tensor, NOTHING


def _shape(
    name: str, suffix: str, rows: int, columns: int, layer: torch.nn.Module
) -> tuple[int, ...]:
    """Return the checkpoint shape of a parameter of a linear layer."""
    if suffix == "weight":
        return (rows, columns)
    if suffix == "weight_scale":
        return scale_shape(
            rows, columns, blocks=getattr(layer, "weight_block_size", None) is not None
        )
    raise WeightSyncError(
        f"the engine's layer {name} has a parameter {suffix} that no update carries"
    )


class RowShard(NamedTuple):
    """Output rows of one kind in a checkpoint, and this rank's part of them."""

    rows: int
    first: int
    length: int


def _parts(
    name: str, layer: Any, fused_names: dict[str, list[str]]
) -> list[tuple[str, list[RowShard]]]:
    """Return the checkpoint's layers behind one engine layer, with the kinds of rows of each."""
    parent, _, last = name.rpartition(".")
    kinds = _rows(layer)
    parts = fused_names.get(last, [last])
    if parts == [last]:  # not fused, or fused in the checkpoint, too
        return [(name, kinds)]
    if not isinstance(layer, ColumnParallelLinear):
        raise WeightSyncError(
            f"the engine's layer {name} is fused in a way that updates do not support"
        )
    return [(f"{parent}.{part}", [kind]) for part, kind in zip(parts, kinds, strict=True)]


def _rows(layer: Any) -> list[RowShard]:
    if isinstance(layer, QKVParallelLinear):
        kv_rank = layer.tp_rank // layer.num_kv_head_replicas
        query = RowShard(
            layer.total_num_heads * layer.head_size,
            layer.tp_rank,
            layer.num_heads * layer.head_size,
        )
        of_key = [
            RowShard(layer.total_num_kv_heads * size, kv_rank, layer.num_kv_heads * size)
            for size in (layer.head_size, layer.v_head_size)
        ]
        return [
            RowShard(
                kind.rows,
                kind.first * kind.length,
                kind.length,
            )
            for kind in (query, *of_key)
        ]
    if isinstance(layer, ColumnParallelLinear):
        sizes = getattr(layer, "output_sizes", [layer.output_size])
        return [
            RowShard(rows, layer.tp_rank * (rows // layer.tp_size), rows // layer.tp_size)
            for rows in sizes
        ]
    return [RowShard(layer.output_size, 0, layer.output_size)]


def _one_after_the_other(kinds: list[RowShard]) -> Runs:
    starts = accumulate((kind.rows for kind in kinds), initial=0)
    return tuple(
        (start + kind.first, kind.length) for start, kind in zip(starts, kinds, strict=False)
    )


def _as_blocks(runs: Runs, rows: int, shares: int) -> Runs:
    """Return the rows in units of blocks, for the scales of block-quantized weights."""
    return tuple((first * shares // rows, -(-length * shares // rows)) for first, length in runs)


def _columns(rank: int, ranks: int, shape: tuple[int, ...]) -> Shard:
    """Return equal shares of the inputs. Scales of complete rows have one column, for all ranks."""
    each = shape[1] // ranks
    if shape[1] == 1:
        return WHOLE
    return Shard(1, ((rank * each, each),))
