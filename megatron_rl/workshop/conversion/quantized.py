"""Plain weights -> what a quantized engine holds: the tensors that a sync would send it, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_rl.config.schema import Format, KvCache
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.quantization.formats import (
    QUANTIZED,
    SCALE_DTYPE,
    is_quantized,
    quantization_config,
    scale_name,
    scale_shape,
)
from megatron_rl.quantization.quantize import quantize, sample_error, summarize
from megatron_rl.quantization.smoothing import Smoothing, column_amax
from megatron_rl.workshop.conversion.imports import refuse_others
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.to_folder import Beside, write_folder
from megatron_rl.workshop.conversion.weights import Get, Weights, digest

DTYPE = "bfloat16"  # of what stays unquantized; what a learner in BF16 quantizes is rounded to it before


@dataclass(frozen=True)
class Recipe:
    """How weights become those of an engine."""

    format: Format
    ignore: Sequence[str] = ()
    rounds_first: bool = True  # False: a learner that holds its weights in FP32 quantizes those
    smoothing: Smoothing | None = None
    cache: Mapping[str, torch.Tensor] = field(default_factory=dict)  # scales of an FP8 cache, by name

    def quantizes(self, name: str) -> bool:
        return is_quantized(name, self.format, self.ignore)


def quantize_folder(
    source: Source,
    target: Path,
    recipe: Recipe,
    options: Mapping[str, Any],
    note: Callable[[str], None],
    **more: Any,
) -> None:
    """`options`: what the recipe was made from, as far as it decides the bytes. `more`: for parity.json."""
    plain, shape = source.plain, source.shape
    refuse_others(plain, shape, source.path)
    kv_cache = KvCache.fp8 if recipe.cache else KvCache.none
    layout = quantization_config(recipe.format, recipe.ignore, kv_cache)
    key = "dtype" if "dtype" in source.hf_config else "torch_dtype"
    write_folder(
        quantized(plain, shape, recipe),
        target,
        Beside(source.folder, {"quantization_config": layout, key: DTYPE}),
        command="quantize",
        job={**source.job, **options},
        inputs=[source.path],
        note=note,
        format=recipe.format.value,
        **more,
    )


def quantized(weights: Weights, shape: ModelShape, recipe: Recipe) -> Weights:
    """`weights`: plain ones, of a whole model; what no model has is left out."""
    behind = {name: param for param in params(shape) if not param.row.copy for name in param.hf}
    specs: dict[str, TensorSpec] = {}
    source: dict[str, str] = {}  # output -> what it is made of
    for name in behind:
        made = _specs(weights.specs[name], recipe)
        specs |= {one.name: one for one in made}
        source |= dict.fromkeys((one.name for one in made), name)
    specs |= {name: TensorSpec.of(name, scale) for name, scale in recipe.cache.items()}
    made_of: dict[str, list[dict[str, str]]] = {}
    errors: dict[str, float] = {}

    def opened() -> Get:
        get, kept = weights.open(), dict[str, torch.Tensor]()

        def made(name: str) -> torch.Tensor:
            if name in recipe.cache:
                made_of[name] = [{}]
                return recipe.cache[name]
            if name not in kept:
                kept.clear()
                tensor = get(source[name])
                read = [{source[name]: digest(tensor)}]
                kept.update(_made(source[name], tensor, behind[source[name]], recipe, errors))
                made_of.update(dict.fromkeys(kept, read))
            return kept[name]

        return made

    return Weights(specs, opened, made_of, errors)


def weight_amax(weights: Weights, shape: ModelShape, recipe: Recipe) -> torch.Tensor:
    """[layer, norm, channel]: the largest weight of each column over the quantized readers of a norm."""
    amax_LNH, get = torch.zeros(shape.layers, len(Norm), shape.hidden), weights.open()
    for param in params(shape):
        if param.row.norm is None or param.layer is None or len(param.shapes[0]) == 1:
            continue
        here = amax_LNH[param.layer, param.row.norm]
        for name in filter(recipe.quantizes, param.hf):
            torch.maximum(here, column_amax(_rounded(get(name), recipe)), out=here)
    return amax_LNH


def _specs(spec: TensorSpec, recipe: Recipe) -> list[TensorSpec]:
    if not recipe.quantizes(spec.name):
        return [TensorSpec(spec.name, DTYPE, spec.shape)]
    kind = QUANTIZED[recipe.format]
    rows, columns = spec.shape
    scale = TensorSpec(scale_name(spec.name), SCALE_DTYPE, scale_shape(rows, columns, kind.blocks))
    return [TensorSpec(spec.name, kind.dtype, spec.shape), scale]


def _made(
    name: str, tensor: torch.Tensor, param: Param, recipe: Recipe, errors: dict[str, float]
) -> dict[str, torch.Tensor]:
    tensor = _rounded(tensor, recipe)
    if recipe.smoothing is not None:
        tensor = recipe.smoothing.fold(param, tensor)
    if not recipe.quantizes(name):
        return {name: tensor.to(torch_dtype(DTYPE))}
    try:
        result = quantize(tensor, recipe.format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    ((_, errors[name]),) = summarize([sample_error(name, tensor, result, recipe.format)]).worst
    return {name: result["weight"], scale_name(name): result["weight_scale"]}


def _rounded(tensor: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    return tensor.to(torch_dtype(DTYPE)) if recipe.rounds_first else tensor
