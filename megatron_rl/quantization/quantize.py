"""Weight quantizers: INT8, INT4 and FP8 per output channel, FP8 in 128x128 blocks; their errors.

Symmetric, scales in FP32. Every element is computed from its own value and its scale only, so that
a shard quantized with the amax of the full tensor equals that slice of the quantized full tensor.

Shapes: O output features, I input features, P and Q 128-blocks along O and I.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.models.tensors import torch_dtype
from megatron_rl.quantization.formats import BLOCK, FP8_MAX, QUANTIZED

TINY = 1e-12  # an all-zero row gets a scale that can be divided by
CACHED_ELEMENTS = 1 << 18  # FP32, for each thread: a megabyte
ROWS = 64  # sampled per weight: the estimate costs a few percent of quantizing


def row_amax(weight_OI: Tensor) -> Tensor:
    """Return the largest magnitude per output row, FP32; to be all-reduced (max) for a row-parallel
    weight.
    """
    weight_OI = weight_OI.detach()
    if weight_OI.dtype != torch.bfloat16 or weight_OI.device.type != "cpu" or not weight_OI.numel():
        return weight_OI.abs().amax(dim=1).float()
    # without their signs, BF16 values order like the integers of the same bits, which compare twice
    # as fast
    bits_OI = weight_OI.contiguous().view(torch.int16)
    rows = _rows_at_once(weight_OI)
    scratch_OI = torch.empty((rows, weight_OI.shape[1]), dtype=torch.int16)
    amax_O = torch.empty(len(bits_OI), dtype=torch.int16)
    for start in range(0, len(bits_OI), rows):
        some_OI = bits_OI[start : start + rows]
        unsigned_OI = torch.bitwise_and(some_OI, 0x7FFF, out=scratch_OI[: len(some_OI)])
        torch.amax(unsigned_OI, dim=1, out=amax_O[start : start + rows])
    return amax_O.view(torch.bfloat16).float()


def quantize(weight_OI: Tensor, format: Format, amax_O: Tensor | None = None) -> dict[str, Tensor]:
    """Return a linear layer's `weight` and `weight_scale` ([O, 1], or [P, Q] for blocks).

    `amax_O` is the row amax over *all* shards of a row-parallel weight; left out, the tensor is
    whole in I. Blocks own their amax: a shard must begin and end on a multiple of 128.
    """
    kind = QUANTIZED[format]
    if kind.blocks:
        return _quantize_blocks(weight_OI)
    # then values exceed the range only by rounding, which the conversion clamps
    own = amax_O is None
    amax_O = row_amax(weight_OI) if amax_O is None else amax_O.float()
    _refuse_non_finite(amax_O)
    scale_O1 = (amax_O.clamp(min=TINY) / kind.largest).unsqueeze(1)
    weight_OI = weight_OI.detach()
    rounded_OI = torch.empty(
        weight_OI.shape, dtype=torch_dtype(kind.dtype), device=weight_OI.device
    )
    rows = _rows_at_once(weight_OI)
    scratch_OI = torch.empty(
        (rows, weight_OI.shape[1]), dtype=torch.float32, device=weight_OI.device
    )
    for start in range(0, weight_OI.shape[0], rows):
        some_OI = weight_OI[start : start + rows]
        scaled_OI = scratch_OI[: len(some_OI)].copy_(some_OI).div_(scale_O1[start : start + rows])
        if kind.integer:
            scaled_OI.round_()
        if not own:
            scaled_OI.clamp_(-kind.largest, kind.largest)
        rounded_OI[start : start + rows].copy_(scaled_OI)
    return {"weight": rounded_OI, "weight_scale": scale_O1}


def dequantize(weight_OI: Tensor, scale: Tensor) -> Tensor:
    """Return FP32 values of quantized weights; the scale is [O, 1], or [P, Q] for blocks."""
    if scale.shape == (weight_OI.shape[0], 1):
        return weight_OI.float() * scale
    rows, columns = weight_OI.shape
    full_scale_OI = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[
        :, :columns
    ]
    return weight_OI.float() * full_scale_OI


def _quantize_blocks(weight_OI: Tensor) -> dict[str, Tensor]:
    weight_OI = weight_OI.detach()
    rows, columns = weight_OI.shape
    rounded_OI = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn, device=weight_OI.device)
    scale_PQ = torch.empty((-(-rows // BLOCK), -(-columns // BLOCK)), device=weight_OI.device)
    at_once = -(-_rows_at_once(weight_OI) // (4 * BLOCK)) * BLOCK  # several FP32 copies of them
    for start in range(0, rows, at_once):
        some_OI = weight_OI[start : start + at_once]
        padded_OI = torch.nn.functional.pad(
            some_OI.float(), (0, -columns % BLOCK, 0, -len(some_OI) % BLOCK)
        )
        blocks_PBQB = padded_OI.view(
            len(padded_OI) // BLOCK, BLOCK, padded_OI.shape[1] // BLOCK, BLOCK
        )
        amax_PQ = blocks_PBQB.abs().amax(dim=(1, 3))
        _refuse_non_finite(amax_PQ)
        some_PQ = scale_PQ[start // BLOCK :][: len(amax_PQ)].copy_(
            amax_PQ.clamp(min=TINY) / FP8_MAX
        )
        scaled_OI = (blocks_PBQB / some_PQ[:, None, :, None]).view(padded_OI.shape)
        rounded_OI[start : start + at_once].copy_(scaled_OI[: len(some_OI), :columns])
    return {"weight": rounded_OI, "weight_scale": scale_PQ}


def _rows_at_once(weight_OI: Tensor) -> int:
    """Return the number of rows to round at once: on a CPU those that fit its cache, elsewhere
    all.
    """
    rows, columns = weight_OI.shape
    if weight_OI.device.type != "cpu":
        return max(rows, 1)
    return min(max(torch.get_num_threads() * CACHED_ELEMENTS // max(columns, 1), 1), max(rows, 1))


def _refuse_non_finite(amax: Tensor) -> None:
    if not bool(torch.isfinite(amax).all()):
        raise ValueError(
            "the weight holds NaN or infinity and cannot be quantized: the learner has diverged"
        )


@dataclass(frozen=True)
class ErrorSummary:
    """Relative Frobenius errors of quantized weights."""

    largest: float
    mean: float
    clamped_fraction: float  # fraction of values beyond the range of their scale

    @classmethod
    def merge(cls, summaries: Iterable[ErrorSummary | None]) -> ErrorSummary | None:
        """Join the summaries of all ranks, some of which hold no quantized weights."""
        measured = [one for one in summaries if one]
        if not measured:
            return None
        return cls(
            max(one.largest for one in measured),
            sum(one.mean for one in measured) / len(measured),
            sum(one.clamped_fraction for one in measured) / len(measured),
        )


def sample_error(weight_OI: Tensor, result: dict[str, Tensor], format: Format) -> Tensor:
    """Return sums over sampled rows, on the device until `summarize` reads them: of squared errors,
    squared weights, values beyond the range of their scale, and values.
    """
    quantized_OI = result["weight"]
    scale = result["weight_scale"]
    kind = QUANTIZED[format]
    if kind.blocks:
        # one row of blocks
        rows = slice(0, BLOCK)
        scale = scale[:1]
        limit_OI = scale.repeat_interleave(BLOCK, 1)[:, : weight_OI.shape[1]] * kind.largest
    else:
        rows = slice(0, None, -(-weight_OI.shape[0] // ROWS))
        scale = scale[rows]
        limit_OI = scale * kind.largest
    original_OI = weight_OI[rows].float()
    difference_OI = dequantize(quantized_OI[rows], scale) - original_OI
    beyond_OI = original_OI.abs() > limit_OI * (1 + 1e-5)
    sums = (
        difference_OI.square().sum(),
        original_OI.square().sum(),
        beyond_OI.float().sum(),
        original_OI.new_full((), original_OI.numel()),
    )
    return torch.stack(sums)


def summarize(samples: list[Tensor]) -> ErrorSummary | None:
    if not samples:
        return None
    error, weight, clamped, values = torch.stack(samples).cpu().double().unbind(1)
    relative = (error / weight.clamp(min=1e-24)).sqrt()
    return ErrorSummary(
        float(relative.max()), float(relative.mean()), float(clamped.sum() / values.sum())
    )
