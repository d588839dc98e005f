"""`tools/convert.py dequantize`: converts quantized weights to plain BF16 ones, which a learner can
train; for `verify`, bounds the rounding error of each value.

A module's weight is one of

    weight, weight_scale [, weight_zero_point]         int8, float8: (weight - zero) * scale
    weight, weight_scale_inv                           float8 of DeepSeek: weight * scale, in blocks
    weight, weight_scale, weight_scale_2               two FP4 in a byte (modelopt):
                                                       weight * scale * scale_2
    weight_packed, weight_scale, weight_global_scale   two FP4 in a byte (llm-compressor):
                                                       weight * scale / global
    weight_packed, weight_scale, weight_shape          integers of 4 or 8 bits in words of 32
                                                       (llm-compressor)

A scale is for the whole tensor, for each output row, for groups of a row's columns, or for blocks.
O output features, I input features.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.apps.conversion.exports import DTYPE, Beside, plain_dtype, write_folder
from megatron_rl.apps.conversion.sources import (
    QUANTIZATION_FILE,
    QUANTIZATION_KEYS,
    Get,
    Source,
    Weights,
)
from megatron_rl.models.tensors import Shape, TensorSpec, torch_dtype
from megatron_rl.quantization.formats import BLOCK

ROWS_ELEMENTS = 1 << 17  # of FP32 values at once
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign
QUANTIZED_DTYPES = frozenset({"int8", "uint8", "float8_e4m3fn"})
PARTS = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
)
# ends of names of scales that belong to activations or a quantized cache: a plain model has none
DROPPED = ("_scale", "_scale_inv", "_zero_point")


@dataclass(frozen=True)
class Meaning:
    """The words of a folder's config.json on all of its quantized weights."""

    block: tuple[int, int] = (BLOCK, BLOCK)
    bits: int = 8  # of packed integers


def part_of(name: str) -> tuple[str, str]:
    """(module, suffix) of a tensor's name."""
    module, _, suffix = name.rpartition(".")
    return module, suffix


def dequantize_folder(source: Source, target: Path) -> None:
    if source.quantization is None:
        raise ValueError(f"{source.path} holds plain weights: config.json names no quantization")
    changes = dict.fromkeys(QUANTIZATION_KEYS) | plain_dtype(source.hf_config)
    beside = Beside(source.folder, changes, without=(QUANTIZATION_FILE,))
    write_folder(
        dequantized(source.weights, source.quantization), target, beside, "dequantize", [source]
    )


def dequantized(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """`config`: the quantization section of config.json."""
    known = meaning(config)
    modules = modules_of(weights)
    specs: dict[str, TensorSpec] = {}
    for name, spec in weights.specs.items():
        module, suffix = part_of(name)
        if module in modules and suffix in ("weight", "weight_packed"):
            plain = f"{module}.weight"
            specs[plain] = TensorSpec(plain, DTYPE, _shape(modules[module], weights, known))
        elif not suffix.endswith(DROPPED) and not (module in modules and suffix in PARTS):
            specs[name] = spec

    def made(name: str, get: Get) -> torch.Tensor:
        module, _ = part_of(name)
        if module not in modules or not name.endswith(".weight"):
            return get(name)
        parts = {part_of(part)[1]: get(part) for part in modules[module]}
        plain = torch.empty(specs[name].shape, dtype=torch_dtype(DTYPE))
        for some in portions(specs[name].shape, known):
            plain[some] = restore(parts, some, specs[name].shape, known)[0]
        return plain

    return weights.made_into(specs, made)


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
            raise ValueError(
                f"{name} is {weights.specs[name].dtype}, but there is no {module}.weight_scale"
            )
        found[module] = list(held.values())
    return found


def _shape(names: list[str], weights: Weights, known: Meaning) -> Shape:
    """The shape of the plain weight; ValueError where its scales are not for one."""
    parts = {part_of(name)[1]: weights.specs[name] for name in names}
    stored = parts.get("weight_packed") or parts["weight"]
    scale = parts.get("weight_scale") or parts["weight_scale_inv"]
    shape = stored.shape
    if "weight_shape" in parts:
        shape = tuple(map(int, weights.open()(parts["weight_shape"].name).tolist()))
    elif stored.dtype == "uint8" or "weight_packed" in parts:  # two in a byte
        shape = (*shape[:-1], 2 * shape[-1])
    if len(shape) != 2:
        raise ValueError(f"{names[0]} is quantized, but no matrix: its shape is {list(shape)}")
    blocks = tuple(-(-length // size) for length, size in zip(shape, known.block, strict=True))
    in_groups = len(scale.shape) == 2 and scale.shape[0] == shape[0] and scale.shape[1] <= shape[1]
    if math.prod(scale.shape) != 1 and scale.shape not in (shape[:1], blocks) and not in_groups:
        raise ValueError(
            f"{scale.name} is {list(scale.shape)}, which is no scale of a weight of {list(shape)}"
        )
    return shape


def portions(shape: Shape, known: Meaning) -> Iterator[slice]:
    """The rows that are worked on at once: whole blocks of them."""
    rows = max(1, ROWS_ELEMENTS // max(shape[1], 1) // known.block[0]) * known.block[0]
    return (slice(start, min(start + rows, shape[0])) for start in range(0, shape[0], rows))


def meaning(config: Mapping[str, Any]) -> Meaning:
    """Block sizes and bits; the layer groups of compressed-tensors must agree on them."""
    blocks = {tuple(config.get("weight_block_size") or ())}
    bits = set()
    for group in (config.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        blocks.add(tuple(weights.get("block_structure") or ()))
        if weights.get("type") == "int":
            bits.add(int(weights["num_bits"]))
    blocks.discard(())
    if len(blocks) > 1 or len(bits) > 1:
        raise ValueError(
            f"layers that are quantized in different ways are not read: blocks {blocks}, bits "
            f"{bits}"
        )
    return Meaning(next(iter(blocks), (BLOCK, BLOCK)), next(iter(bits), 8))


def restore(
    parts: Mapping[str, Tensor], rows: slice, shape: Shape, meaning: Meaning
) -> tuple[Tensor, Callable[[], Tensor]]:
    """FP32 values of some rows (starting at a block), and a function for their rounding bounds."""
    codes_OI, kind = _codes(parts, rows, shape, meaning)

    def spread(values: Tensor) -> Tensor:
        return _spread(values.float(), rows, shape, meaning.block)

    if "weight_zero_point" in parts:
        zero = parts["weight_zero_point"]
        if "weight_shape" in parts:  # packed as the weight is, along the other axis
            zero = _integers(zero.t(), shape[0], meaning.bits).t()
        codes_OI = codes_OI - spread(zero)
    scale = spread(parts["weight_scale"] if "weight_scale" in parts else parts["weight_scale_inv"])
    if "weight_scale_2" in parts:
        scale = scale * parts["weight_scale_2"].float()
    if "weight_global_scale" in parts:
        scale = scale / parts["weight_global_scale"].float()
    return codes_OI * scale, lambda: _half_steps(codes_OI, kind) * scale


def _codes(
    parts: Mapping[str, Tensor], rows: slice, shape: Shape, meaning: Meaning
) -> tuple[Tensor, str]:
    if "weight_packed" in parts and "weight_shape" in parts:
        return _integers(parts["weight_packed"][rows], shape[1], meaning.bits), "integer"
    stored_OI = (parts["weight_packed"] if "weight_packed" in parts else parts["weight"])[rows]
    if stored_OI.dtype == torch.uint8:
        return _fp4(stored_OI), "fp4"
    return stored_OI.float(), "integer" if stored_OI.dtype == torch.int8 else "fp8"


def _half_steps(codes_OI: Tensor, kind: str) -> Tensor:
    """Half the distance to the next code: the largest rounding error at this one."""
    if kind == "integer":
        return torch.full((), 0.5)
    if kind == "fp8":  # three bits of fraction; below the normal numbers the steps are equal
        return (codes_OI.abs() / 16).clamp(min=2.0**-10)
    return (codes_OI.abs() / 4).clamp(min=0.25)


def _spread(scale: Tensor, rows: slice, shape: Shape, block: tuple[int, int]) -> Tensor:
    """A scale for every element of these rows, or one that is broadcast over them."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    count = rows.stop - rows.start
    if scale.shape[0] == shape[0]:
        some = scale[rows].reshape(count, -1)
        groups = some.shape[1]
        if groups == 1:
            return some
        return some.repeat_interleave(-(-shape[1] // groups), 1)[:, : shape[1]]
    high, wide = block
    some = scale[rows.start // high : -(-rows.stop // high)]
    return some.repeat_interleave(high, 0)[:count].repeat_interleave(wide, 1)[:, : shape[1]]


def _fp4(packed_OJ: Tensor) -> Tensor:
    """The lower half of a byte comes first."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    codes_OJ2 = torch.stack((packed_OJ & 0xF, packed_OJ >> 4), dim=-1)
    return table[codes_OJ2.flatten(1).long()]


def _integers(packed_OJ: Tensor, columns: int, bits: int) -> Tensor:
    """Unpack 32-bit words of consecutive columns, lowest bits first, as signed codes."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed_OJ.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :columns].float() - (1 << (bits - 1))
