"""Quantized weights, whoever made them -> plain BF16 ones, which a learner can train."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.quantization.formats import BLOCK
from megatron_rl.workshop.conversion.exports import Beside, write_folder
from megatron_rl.workshop.conversion.sources import QUANTIZATION_FILE, QUANTIZATION_KEYS, Get, Source, Weights
from megatron_rl.workshop.conversion.stored_forms import (
    DROPPED,
    PARTS,
    QUANTIZED_DTYPES,
    Meaning,
    part_of,
    restore,
    shape_of,
)

DTYPE = "bfloat16"
ROWS_ELEMENTS = 1 << 17  # of FP32 values at once


def dequantize_folder(source: Source, target: Path) -> None:
    if source.quantization is None:
        raise ValueError(f"{source.path} holds plain weights: config.json names no quantization")
    key = "dtype" if "dtype" in source.hf_config else "torch_dtype"
    changes = dict.fromkeys(QUANTIZATION_KEYS) | {key: DTYPE}
    beside = Beside(source.folder, changes, without=(QUANTIZATION_FILE,))
    write_folder(dequantized(source.weights, source.quantization), target, beside, "dequantize", [source])


def dequantized(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """`config`: what config.json says of the quantization."""
    known, modules = meaning(config), modules_of(weights)
    specs: dict[str, TensorSpec] = {}
    for name, spec in weights.specs.items():
        module, suffix = part_of(name)
        if module in modules:
            if suffix in ("weight", "weight_packed"):
                plain = f"{module}.weight"
                specs[plain] = TensorSpec(plain, DTYPE, _shape(modules[module], weights, known))
            elif suffix not in PARTS and suffix not in DROPPED:
                specs[name] = spec  # a bias
        elif suffix not in DROPPED:
            specs[name] = spec

    def opened() -> Get:
        get = weights.open()

        def made(name: str) -> torch.Tensor:
            module, _ = part_of(name)
            if module not in modules or not name.endswith(".weight"):
                return get(name)
            parts = {part_of(part)[1]: get(part) for part in modules[module]}
            plain = torch.empty(specs[name].shape, dtype=torch_dtype(DTYPE))
            for some in portions(specs[name].shape, known):
                plain[some] = restore(parts, some, specs[name].shape, known)[0]
            return plain

        return made

    return Weights(specs, opened)


def modules_of(weights: Weights) -> dict[str, list[str]]:
    """Quantized module -> the tensors of its weight; ValueError for what cannot be understood."""
    parts: dict[str, dict[str, str]] = {}
    for name in weights.specs:
        module, suffix = part_of(name)
        if suffix in PARTS:
            parts.setdefault(module, {})[suffix] = name
        elif suffix == "weight_g_idx":
            raise ValueError(f"{name}: columns in an order of their own (act-order) are not read")
    found: dict[str, list[str]] = {}
    for module, held in parts.items():
        name = held.get("weight", held.get("weight_packed", ""))
        scaled = held.keys() - {"weight"}
        if not name:
            raise ValueError(f"{next(iter(held.values()))} belongs to a weight that is not there")
        if held.keys() == {"weight"} and weights.specs[name].dtype not in QUANTIZED_DTYPES:
            continue
        if not scaled & {"weight_scale", "weight_scale_inv"}:
            raise ValueError(f"{name} is {weights.specs[name].dtype}, but there is no {module}.weight_scale")
        found[module] = list(held.values())
    return found


def _shape(names: list[str], weights: Weights, known: Meaning) -> tuple[int, ...]:
    """The shape of the plain weight; ValueError where its scales are not for one."""
    stored = next((name for name in names if name.endswith(".weight_shape")), None)
    given = tuple(map(int, weights.open()(stored).tolist())) if stored else None
    parts = {part_of(name)[1]: weights.specs[name] for name in names}
    shape = shape_of({suffix: (spec.dtype, spec.shape) for suffix, spec in parts.items()}, given)
    if len(shape) != 2:
        raise ValueError(f"{names[0]} is quantized, but no matrix: its shape is {list(shape)}")
    scale = parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"]
    blocks = tuple(-(-length // size) for length, size in zip(shape, known.block, strict=True))
    fits = (
        math.prod(scale.shape) == 1
        or scale.shape == shape[:1]
        or (len(scale.shape) == 2 and scale.shape[0] == shape[0] and scale.shape[1] <= shape[1])
        or scale.shape == blocks
    )
    if not fits:
        raise ValueError(f"{scale.name} is {list(scale.shape)}, which is no scale of a weight of {list(shape)}")
    return shape


def portions(shape: tuple[int, ...], known: Meaning) -> Iterator[slice]:
    """The rows that are worked on at once: whole blocks of them."""
    rows = max(1, ROWS_ELEMENTS // max(shape[1], 1) // known.block[0]) * known.block[0]
    return (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))


def meaning(config: Mapping[str, Any]) -> Meaning:
    """Block sizes and bits; compressed-tensors has them in groups of layers, which have to agree on them."""
    groups = config.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    given = [config.get("weight_block_size"), *(one.get("block_structure") for one in weights)]
    blocks = {(int(high), int(wide)) for high, wide in filter(None, given)}
    bits = {int(one["num_bits"]) for one in weights if one.get("type") == "int" and one.get("num_bits")}
    if len(blocks) > 1 or len(bits) > 1:
        raise ValueError(f"layers that are quantized in different ways are not read: blocks {blocks}, bits {bits}")
    return Meaning(next(iter(blocks), (BLOCK, BLOCK)), next(iter(bits), 8))
