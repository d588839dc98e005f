"""Double buffer of a vLLM model's weights on a CPU, for `file` updates: loaded into a copy, then
swapped in.

`SecondBuffer` is a copy of the live module tree: the same classes and settings, but parameters, kernels and
packed weights of its own. vLLM's loaders fill the twin and vLLM's layers pack it, while the live
model is unchanged; `swap` then exchanges the two, which takes milliseconds. A failure before the
swap leaves the live model intact.

Attention layers are shared with the live model: they hold the cache, and on CPUs no update changes
them.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import ScaledMMLinearKernel
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs, sanitize_layer_refs

from megatron_rl.engine.expectation import cache_scale_names, checkpoint_parameters
from megatron_rl.engine.reload import (
    mark_unwritten_experts,
    refresh_tied_head,
    refuse_missing,
    refuse_unwritten_experts,
    wanted_names,
)


def can_double(model: torch.nn.Module) -> bool:
    """True if a twin can pack every layer that packs its weights.

    False for the scales of a quantized cache: they belong to the attention layers, which are
    shared.
    """
    packed = (
        m
        for m in model.modules()
        if isinstance(getattr(m, "quant_method", None), QuantizeMethodBase)
    )
    known = LinearBase | VocabParallelEmbedding | RoutedExperts
    kinds = all(isinstance(m, known) or is_deferred_attention_layer(m) for m in packed)
    caches = any(cache_scale_names(name, layer) for name, layer in model.named_modules())
    return (
        kinds and not caches and not callable(getattr(model, "process_weights_after_loading", None))
    )


class SecondBuffer:
    """Copy of the weights, to be served next."""

    @torch.no_grad()
    def __init__(self, model: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill and pack the copy; raise if a parameter was not written. The live model is
        unchanged.
        """
        self._pairs: dict[torch.nn.Module, torch.nn.Module] = {}  # live, twin
        twin_model = self._twin(model)
        for live, twin in self._pairs.items():
            _give_parameters(live, twin)
        refresh_tied_head(twin_model)
        mark_unwritten_experts(twin_model)
        refuse_missing(wanted_names(twin_model) - twin_model.load_weights(tensors.items()))
        refuse_unwritten_experts(twin_model)
        has_head = any(isinstance(twin, ParallelLMHead) for twin in self._pairs.values())
        for twin in self._pairs.values():
            if (
                has_head
                and isinstance(twin, VocabParallelEmbedding)
                and not isinstance(twin, ParallelLMHead)
            ):
                # an embedding is only looked up; vLLM packs it for products anyway
                twin.__dict__["cpu_linear"] = torch.nn.functional.linear
                continue
            quant_method = getattr(twin, "quant_method", None)
            if isinstance(quant_method, QuantizeMethodBase):
                quant_method.process_weights_after_loading(twin)

    def swap(self) -> None:
        """Make these weights the live ones; the previous ones are released with this object."""
        for live, twin in self._pairs.items():
            live.__dict__, twin.__dict__ = twin.__dict__, live.__dict__
            # each tree keeps its own children
            live.__dict__["_modules"], twin.__dict__["_modules"] = twin._modules, live._modules

    def _twin(self, live: torch.nn.Module) -> Any:
        if live in self._pairs:
            return self._pairs[live]
        twin = object.__new__(type(live))
        twin.__dict__ = dict(live.__dict__)
        twin.__dict__["_parameters"] = dict(live._parameters)
        twin.__dict__["_buffers"] = dict(live._buffers)
        twin.__dict__["_modules"] = {
            name: child
            if child is None or is_deferred_attention_layer(child)
            else self._twin(child)
            for name, child in live._modules.items()
        }
        scheme = live.__dict__.get("scheme")
        if scheme is not None:
            twin.__dict__["scheme"] = _own_kernels(scheme)
        if isinstance(live, RoutedExperts):
            twin.__dict__["quant_method"] = method = copy.copy(live.quant_method)
            method.moe_kernel = None  # vLLM would copy into what an old one has packed
        self._pairs[live] = twin
        return twin


def _own_kernels(scheme: Any) -> Any:
    """Return the scheme with kernels of its own: they hold the packed weights."""
    twin = copy.copy(scheme)
    for name, value in vars(scheme).items():
        if isinstance(value, ScaledMMLinearKernel):
            setattr(twin, name, copy.copy(value))
    return twin


def _give_parameters(live: torch.nn.Module, twin: torch.nn.Module) -> None:
    """Create uninitialized parameters in checkpoint layout, with the loaders of the live layer.

    vLLM records that layout without biases, which never change it.
    """
    layout = dict(checkpoint_parameters(live))
    bias = live._parameters.get("bias")
    if bias is not None:
        layout["bias"] = sanitize_layer_refs(to_meta_tensor(bias), live)
    for name, meta in layout.items():
        parameter: Any = restore_layer_refs(materialize_meta_tensor(meta), live)
        twin._parameters[name] = parameter
