"""Loads checkpoint-layout tensors into a live vLLM model, repacks the weights of kernels, and
refuses unwritten parameters.

CPUs: vLLM's CPU kernels pack weights into oneDNN handles and drop the originals, which vLLM's own
in-place reload does not undo (INT8 generates garbage, a tied lm_head keeps its old packed copy,
experts are packed on the first load only). Here every packed layer gets its checkpoint-layout
parameters back, the model's own `load_weights` fills them, and every layer is processed again as
after a first load.

GPUs: vLLM's layerwise reload keeps the tensors that CUDA graphs captured; it is used as it is.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    get_layerwise_info,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from megatron_rl.engine.expectation import cache_scale_names, checkpoint_parameters
from megatron_rl.weight_sync.manifest import WeightSyncError


@torch.no_grad()
def load(
    model: Any,
    model_config: ModelConfig,
    device: torch.device,
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Replace every parameter of the live model; raises if one of them was not written."""
    dtype = model_config.dtype
    assert isinstance(dtype, torch.dtype)  # vLLM has resolved "auto" by now
    with set_default_torch_dtype(dtype), device:
        if device.type == "cpu":
            restore_checkpoint_layout(model)
            refuse_missing(wanted_names(model) - model.load_weights(tensors))
            refuse_unwritten_experts(model)
            refresh_tied_head(model)
            process_weights_after_loading(model, model_config, device)
        else:
            load_layerwise(model, model_config, tensors)


def load_layerwise(
    model: Any, model_config: ModelConfig, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Load with vLLM's layerwise reload, and collect the unwritten parameters, which vLLM only
    logs.
    """
    initialize_layerwise_reload(model)
    wanted = wanted_names(model)
    loaded = model.load_weights(tensors)
    unwritten = set(half_written_experts(model))
    finalize_layerwise_reload(model, model_config)
    refuse_missing((wanted - loaded) | unwritten)


def restore_checkpoint_layout(model: Any) -> None:
    """Give every packed layer back the parameters that its weight loaders write into."""
    for layer in model.modules():
        if is_deferred_attention_layer(layer):
            # scales of a quantized KV cache: back to the sentinels that mean "not given"
            quant_method = getattr(layer, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.create_weights(layer)
            continue
        if isinstance(layer, RoutedExperts):
            # with an existing kernel vLLM would copy the new weights in, unpacked
            layer.quant_method.moe_kernel = None
        for name, meta in checkpoint_parameters(layer).items():
            current = layer._parameters.get(name)
            if current is None or type(current) is not type(meta) or current.shape != meta.shape:
                # uninitialized, with the class and the weight loader of the recorded parameter
                layer.register_parameter(
                    name, restore_layer_refs(materialize_meta_tensor(meta), layer)
                )
    mark_unwritten_experts(model)


def mark_unwritten_experts(model: Any) -> None:
    """Fill experts' parameters with the marker that `refuse_unwritten_experts` checks for."""
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            for stack in _expert_stacks(layer).values():
                stack.fill_(torch.nan)


def wanted_names(model: Any) -> set[str]:
    """Return every parameter that an update has to write, by the names that `load_weights` reports.

    Excluded: a tied head, which is loaded as the embedding, and other buffers of attention layers
    than the scales of a quantized cache.
    """
    tied = bool(model.config.tie_word_embeddings)
    names: set[str] = set()
    for name, layer in model.named_modules():
        if is_deferred_attention_layer(layer):
            names |= set(cache_scale_names(name, layer))
        elif not (tied and isinstance(layer, ParallelLMHead)):
            names |= {
                f"{name}.{parameter}" for parameter, _ in layer.named_parameters(recurse=False)
            }
    return names


def half_written_experts(model: Any) -> Iterator[str]:
    """Return the layers with experts that are missing after all tensors have arrived."""
    for name, layer in model.named_modules():
        books = get_layerwise_info(layer)
        if isinstance(layer, RoutedExperts) and 0 < books.load_numel < (
            books.load_numel_total or 0
        ):
            yield f"{name} (some of its experts)"


def refuse_unwritten_experts(model: Any) -> None:
    """Raise for unwritten experts: all experts of a layer share a parameter, which counts as loaded
    after the first.
    """
    refuse_missing(
        {
            f"{name}.{parameter}[{expert}] (or it holds NaN)"
            for name, layer in model.named_modules()
            if isinstance(layer, RoutedExperts)
            for parameter, stack in _expert_stacks(layer).items()
            for expert, weight in enumerate(stack)
            if bool(torch.isnan(weight).any())
        }
    )


def _expert_stacks(layer: RoutedExperts) -> dict[str, Tensor]:
    """Return the unquantized weights of a layer's experts; the first dimension counts experts."""
    plain = (torch.bfloat16, torch.float16, torch.float32)
    return {
        name: weight.data
        for name, weight in layer.named_parameters(recurse=False)
        if weight.dtype in plain
    }


def refresh_tied_head(model: Any) -> None:
    """Make a tied head use the embedding that was just loaded."""
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    if model.config.tie_word_embeddings and len(heads) == 1 and len(embeddings) == 1:
        heads[0].weight = embeddings[0].weight


def refuse_missing(names: set[str]) -> None:
    if names:
        raise WeightSyncError(
            f"the update left parameters of the engine unwritten: {', '.join(sorted(names)[:8])}"
        )
