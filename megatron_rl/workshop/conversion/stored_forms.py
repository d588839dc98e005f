"""Quantized weights as other tools store them, back to numbers: which tensors belong to one weight, and what they mean.

A module's weight is one of

    weight, weight_scale [, weight_zero_point]          int8, float8: (weight - zero) * scale
    weight, weight_scale_inv                            float8 of DeepSeek: weight * scale, in blocks
    weight, weight_scale, weight_scale_2                two FP4 in a byte: weight * scale * scale_2 (modelopt)
    weight_packed, weight_scale, weight_global_scale    two FP4 in a byte: weight * scale / global (llm-compressor)
    weight_packed, weight_scale, weight_shape           integers of 4 or 8 bits in words of 32 (llm-compressor)

A scale is for the whole tensor, for each output row, for groups of a row's columns, or for blocks.

O output features, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.quantization.formats import BLOCK

FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by three bits; the fourth is the sign
QUANTIZED_DTYPES = frozenset({"int8", "uint8", "float8_e4m3fn"})
PARTS = (
    "weight", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale",
    "weight_zero_point", "weight_shape",
)  # fmt: skip
# of activations and of a quantized cache: a plain model has none
DROPPED = (
    "input_scale", "input_scale_inv", "input_global_scale", "input_zero_point", "output_scale", "output_zero_point",
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_zero_point", "v_zero_point", "activation_scale",
)  # fmt: skip


@dataclass(frozen=True)
class Meaning:
    """What the folder's config.json says of all of its quantized weights."""

    block: tuple[int, int] = (BLOCK, BLOCK)
    bits: int = 8  # of packed integers


def part_of(name: str) -> tuple[str, str]:
    """(module, suffix) of a tensor's name."""
    module, _, suffix = name.rpartition(".")
    return module, suffix


def shape_of(parts: Mapping[str, tuple[str, tuple[int, ...]]], shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The plain weight's shape. `parts`: suffix -> (dtype, shape). `shape`: what weight_shape holds, if it is there."""
    if "weight_packed" in parts:
        if shape is not None:
            return shape
        rows, columns = parts["weight_packed"][1]
        return rows, 2 * columns
    dtype, stored = parts["weight"]
    return (stored[0], 2 * stored[1]) if dtype == "uint8" else stored


def restore(
    parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, ...], meaning: Meaning
) -> tuple[Tensor, Callable[[], Tensor]]:
    """FP32 values of some rows of the weight, which begin with a block; how far rounding may have moved each."""
    count = len(range(*rows.indices(shape[0])))
    codes_OI, kind = _codes(parts, rows, shape, meaning)

    def spread(values: Tensor) -> Tensor:
        return _spread(values.float(), rows, shape, count, meaning.block)

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


def _codes(parts: Mapping[str, Tensor], rows: slice, shape: tuple[int, ...], meaning: Meaning) -> tuple[Tensor, str]:
    if "weight_packed" in parts and "weight_shape" in parts:
        return _integers(parts["weight_packed"][rows], shape[1], meaning.bits), "integer"
    stored_OI = (parts["weight_packed"] if "weight_packed" in parts else parts["weight"])[rows]
    if stored_OI.dtype == torch.uint8:
        return _fp4(stored_OI), "fp4"
    return stored_OI.float(), "integer" if stored_OI.dtype == torch.int8 else "fp8"


def _half_steps(codes_OI: Tensor, kind: str) -> Tensor:
    """Half the distance to the next code, of whatever rounds to this one at the most."""
    if kind == "integer":
        return torch.full((), 0.5)
    if kind == "fp8":  # three bits of fraction; below the normal numbers the steps are equal
        return (codes_OI.abs() / 16).clamp(min=2.0**-10)
    return (codes_OI.abs() / 4).clamp(min=0.25)


def _spread(scale: Tensor, rows: slice, shape: tuple[int, ...], count: int, block: tuple[int, int]) -> Tensor:
    """A scale for every element of these rows, or one that is broadcast over them."""
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.shape[0] == shape[0]:
        some = scale[rows].reshape(count, -1)
        groups = some.shape[1]
        return some if groups == 1 else some.repeat_interleave(-(-shape[1] // groups), 1)[:, : shape[1]]
    high, wide = block
    some = scale[rows.start // high : -(-(rows.start + count) // high)]
    spread = some[:, None, :, None].expand(-1, high, -1, wide)
    return spread.reshape(len(some) * high, -1)[:count, : shape[1]]


def _fp4(packed_OJ: Tensor) -> Tensor:
    """The lower half of a byte comes first."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    codes_OJ2 = torch.stack((packed_OJ & 0xF, packed_OJ >> 4), dim=-1)
    return table[codes_OJ2.flatten(1).long()]


def _integers(packed_OJ: Tensor, columns: int, bits: int) -> Tensor:
    """Words of 32 bits hold the columns in turn, the first in the lowest bits, each as its distance from the least."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = (packed_OJ.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(1)[:, :columns].float() - (1 << (bits - 1))
