"""How much a quantized weight differs from the original, estimated on a few of its rows at every sync."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron_rl.config.schema import Format
from megatron_rl.quantization.formats import BLOCK, QUANTIZED
from megatron_rl.quantization.quantize import dequantize

ROWS = 64  # sampled per weight: the estimate costs a few percent of quantizing


@dataclass(frozen=True)
class ErrorSample:
    """Sums over the sampled rows, on the device until `summary` reads them."""

    name: str
    squared_error: torch.Tensor
    squared_weight: torch.Tensor
    clamped: torch.Tensor
    elements: int


@dataclass(frozen=True)
class ErrorSummary:
    worst: tuple[tuple[str, float], ...] = ()  # relative Frobenius error, largest first
    clamped_fraction: float = 0.0  # values beyond what their scale can express
    mean: float = 0.0

    @classmethod
    def merge(cls, summaries: Iterable[ErrorSummary], count: int = 5) -> ErrorSummary:
        """Over ranks: shards of one weight are different rows of it, the worst stands for the weight."""
        worst: dict[str, float] = {}
        parts = list(summaries)
        for part in parts:
            for name, error in part.worst:
                worst[name] = max(error, worst.get(name, 0.0))
        ranked = sorted(worst.items(), key=lambda item: -item[1])[:count]
        measured = [part for part in parts if part.worst]
        if not measured:
            return cls()
        return cls(
            tuple(ranked),
            sum(part.clamped_fraction for part in measured) / len(measured),
            sum(part.mean for part in measured) / len(measured),
        )


def sample_error(name: str, weight_OI: torch.Tensor, result: dict[str, torch.Tensor], format: Format) -> ErrorSample:
    quantized_OI, scale = result["weight"], result["weight_scale"]
    kind = QUANTIZED[format]
    if kind.blocks:
        rows = slice(0, BLOCK)  # one row of blocks
        scale = scale[:1]
        limit_OI = scale.repeat_interleave(BLOCK, 1)[:, : weight_OI.shape[1]] * kind.largest
    else:
        rows = slice(0, None, -(-weight_OI.shape[0] // ROWS))
        scale = scale[rows]
        limit_OI = scale * kind.largest
    original_OI = weight_OI[rows].float()
    difference_OI = dequantize(quantized_OI[rows], scale) - original_OI
    beyond_OI = original_OI.abs() > limit_OI * (1 + 1e-5)
    return ErrorSample(
        name, difference_OI.square().sum(), original_OI.square().sum(), beyond_OI.sum(), original_OI.numel()
    )


def summarize(samples: list[ErrorSample], count: int = 5) -> ErrorSummary:
    if not samples:
        return ErrorSummary()
    table = torch.stack([torch.stack([s.squared_error, s.squared_weight, s.clamped.float()]) for s in samples]).cpu()
    relative = (table[:, 0] / table[:, 1].clamp(min=1e-24)).sqrt()
    order = relative.argsort(descending=True)[:count].tolist()
    elements = sum(sample.elements for sample in samples)
    return ErrorSummary(
        tuple((samples[i].name, float(relative[i])) for i in order),
        float(table[:, 2].sum()) / elements,
        float(relative.mean()),
    )
