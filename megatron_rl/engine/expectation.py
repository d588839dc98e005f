"""Expected tensors of a weight update, by Hugging Face name, shape and dtype, read off a live vLLM model's own layers.

Independent of the sender's mapping table on purpose: the two must agree, tensor by tensor, before an update is
accepted. Sizes are those of the whole model whatever the engine's tensor parallelism, because vLLM's loaders
take whole tensors and cut their own shard.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, QKVParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.utils.torch_utils import is_quantized_kv_cache

from megatron_rl.models.tensors import TensorSpec, dtype_name
from megatron_rl.quantization.formats import SCALE_DTYPE, scale_shape
from megatron_rl.weight_sync.manifest import WeightSyncError


def expected_tensors(model: torch.nn.Module, tied: bool) -> dict[str, TensorSpec]:
    """Every tensor an update must carry, by its Hugging Face name."""
    fused_names: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    expected: list[TensorSpec] = []
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            expected += _linear(name, module, fused_names)
        elif isinstance(module, RoutedExperts):
            expected += _experts(name, module)
        elif isinstance(module, Attention):
            owner = name.rpartition(".")[0]  # in a checkpoint the scales belong to the attention block
            names = [scale.rpartition(".")[2] for scale in cache_scale_names(name, module)]
            expected += [TensorSpec(f"{owner}.{scale}", SCALE_DTYPE, (1,)) for scale in names]
        elif isinstance(module, ParallelLMHead) and tied:
            continue
        elif isinstance(module, VocabParallelEmbedding):
            shape = (module.org_vocab_size, module.embedding_dim)
            expected.append(TensorSpec(f"{name}.weight", dtype_name(cast(torch.dtype, module.weight.dtype)), shape))
        else:
            own = module.named_parameters(recurse=False)
            expected += [TensorSpec.of(f"{name}.{suffix}", parameter) for suffix, parameter in own]
    return {tensor.name: tensor for tensor in expected}


def checkpoint_parameters(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The layer's parameters as a checkpoint holds them (meta tensors vLLM recorded before it packed the layer)."""
    parameters, _ = get_layerwise_info(layer).restore_metadata
    return parameters


def cache_scale_names(name: str, layer: torch.nn.Module) -> list[str]:
    """The key and value scale of an attention layer with a quantized cache, as vLLM names them."""
    quantized = isinstance(layer, Attention) and is_quantized_kv_cache(layer.kv_cache_dtype)
    return [f"{name}.{scale}" for scale in ("k_scale", "v_scale")] if quantized else []


def neutral_cache_scales(model: Any) -> None:
    """Dummy weights give a quantized cache random scales, negative ones too: 1 until the first sync."""
    for layer in (module for module in model.modules() if cache_scale_names("", module)):
        for kind in ("k", "v"):
            getattr(layer, f"_{kind}_scale").fill_(1.0)
            setattr(layer, f"_{kind}_scale_float", 1.0)


def cache_scales(model: Any) -> dict[str, tuple[float, float]]:
    """(key, value) scale of every attention layer's cache, as its kernels read them; 1 where it is not quantized."""
    scales = {
        name: (cast(torch.Tensor, layer._k_scale), cast(torch.Tensor, layer._v_scale))
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
    }
    # in the middle of vLLM's layerwise reload they are placeholders
    return {name: (float(k.max()), float(v.max())) for name, (k, v) in scales.items() if not k.is_meta}


def _linear(name: str, layer: Any, fused_names: dict[str, list[str]]) -> Iterator[TensorSpec]:
    parameters = checkpoint_parameters(layer)
    for part, rows in _parts(name, layer, fused_names):
        for suffix, parameter in parameters.items():
            shape = _shape(name, suffix, rows, layer.input_size, layer)
            yield TensorSpec(f"{part}.{suffix}", dtype_name(parameter.dtype), shape)
        if layer.bias is not None:
            yield TensorSpec(f"{part}.bias", dtype_name(layer.params_dtype), (rows,))


def _experts(name: str, layer: RoutedExperts) -> Iterator[TensorSpec]:
    """Every expert's projections; the engine stacks gate and up of all its experts (w13), and down of all (w2)."""
    moe = layer.moe_config
    hidden, inner = moe.hidden_dim_unpadded, moe.intermediate_size
    assert hidden is not None
    gate, up, down = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    stacked: dict[str, list[tuple[Any, int, int]]] = {
        "w13": [(gate, inner, hidden), (up, inner, hidden)],
        "w2": [(down, hidden, inner)],
    }
    owner = name.rpartition(".")[0]  # the checkpoint has the experts one level above the module that holds them
    for parameter_name, parameter in checkpoint_parameters(layer).items():
        stack, _, suffix = parameter_name.partition("_")
        if stack not in stacked:
            raise WeightSyncError(f"the engine's layer {name} has a parameter {parameter_name} that no update carries")
        for part, rows, columns in stacked[stack]:
            shape = _shape(name, suffix, rows, columns, layer)
            for expert in range(moe.num_logical_experts):
                yield TensorSpec(f"{owner}.{expert}.{part}.{suffix}", dtype_name(parameter.dtype), shape)


def _shape(name: str, suffix: str, rows: int, columns: int, layer: torch.nn.Module) -> tuple[int, ...]:
    """The shape in a checkpoint of one parameter of a linear layer."""
    if suffix == "weight":
        return (rows, columns)
    if suffix == "weight_scale":
        return scale_shape(rows, columns, blocks=getattr(layer, "weight_block_size", None) is not None)
    raise WeightSyncError(f"the engine's layer {name} has a parameter {suffix} that no update carries")


def _parts(name: str, layer: Any, fused_names: dict[str, list[str]]) -> list[tuple[str, int]]:
    """The checkpoint's layers behind one engine layer, with their output sizes."""
    parent, _, last = name.rpartition(".")
    sizes: Any
    if last not in fused_names:
        return [(name, layer.output_size)]
    if isinstance(layer, QKVParallelLinear):
        key_value = layer.total_num_kv_heads
        sizes = [layer.total_num_heads * layer.head_size, key_value * layer.head_size, key_value * layer.v_head_size]
    elif isinstance(layer, ColumnParallelLinear):
        sizes = layer.output_sizes
    else:
        raise WeightSyncError(f"the engine's layer {name} is fused in a way that updates do not know")
    parts = fused_names[last]
    if parts == [last]:  # joined in the checkpoint, too
        return [(name, sum(sizes))]
    return [(f"{parent}.{part}", size) for part, size in zip(parts, sizes, strict=True)]
