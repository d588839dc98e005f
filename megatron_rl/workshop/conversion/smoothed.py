"""The smoothing that quantized weights were made with, read off their norms: plain ones can then be held against them.

Smoothing divides a norm's weight by powers of two and multiplies the matrices that read it (quantization/smoothing.py).
"""

from __future__ import annotations

import torch

from megatron_rl.models.mapping import params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.quantization.smoothing import LARGEST_EXPONENT, folded
from megatron_rl.workshop.conversion.weights import Get, Weights


def smoothed_as(plain: Weights, quantized: Weights, shape: ModelShape) -> Weights:
    """`plain`, folded as `quantized` was; as it is where that was not, or is of another model."""
    scales: dict[tuple[int, Norm], torch.Tensor] = {}
    get, other = plain.open(), quantized.open()
    readers: dict[str, tuple[int, Norm]] = {}
    for param in params(shape):
        if param.row.norm is None or param.layer is None:
            continue
        place = param.layer, param.row.norm
        readers |= dict.fromkeys(param.hf, place)
        (name, *_) = param.hf
        if len(param.shapes[0]) == 1 and name in plain.specs and name in quantized.specs:
            scale_H = _scale(get(name), other(name))
            if scale_H is not None:
                scales[place] = scale_H
    if not scales:
        return plain

    def opened() -> Get:
        get = plain.open()

        def made(name: str) -> torch.Tensor:
            tensor, scale_H = get(name), scales.get(readers[name]) if name in readers else None
            return tensor if scale_H is None else folded(tensor, scale_H)

        return made

    return Weights(plain.specs, opened)


def _scale(plain_H: torch.Tensor, smoothed_H: torch.Tensor) -> torch.Tensor | None:
    """Powers of two between the two; None where they are equal, or anything else is between them."""
    if plain_H.shape != smoothed_H.shape or torch.equal(plain_H, smoothed_H.to(plain_H.dtype)):
        return None
    ratio_H = torch.where(plain_H == smoothed_H, 1.0, plain_H.float() / smoothed_H.float())
    exponent_H = ratio_H.log2()
    exact = bool((exponent_H == exponent_H.round()).all()) and bool((exponent_H.abs() <= LARGEST_EXPONENT).all())
    return ratio_H if exact else None
