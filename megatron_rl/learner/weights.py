"""Full Hugging Face tensors into a rank's shards, and a random model that no layout can change."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_rl.models.layout import Place
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.models.shards import local_shard


def load(
    named: Iterable[tuple[str, Tensor]],
    model: Model,
    place: Place,
    get_hf: Callable[[str], Tensor],
) -> None:
    """Fill every local parameter (global names) from full tensors."""
    with torch.no_grad():
        for name, parameter in named:
            parameter.copy_(local_shard(name, model.shape, model.layout, place, get_hf))


def random_tensors(model: Model, seed: int) -> Callable[[str], Tensor]:
    """`get_hf` over a random model: each tensor depends on the seed and its own name, on nothing else.

    Linear layers start normal with config.json's initializer_range, those that write into the residual
    stream narrower with depth; norms start at one and biases at zero.
    """
    shape, std = model.shape, float(model.hf_config.get("initializer_range") or 0.02)
    wanted = {name: size for param in params(shape) for name, size in zip(param.hf, param.shapes, strict=True)}
    residual = {name for param in params(shape) if param.row.split == "row" for name in param.hf}

    def get(name: str) -> Tensor:
        size = wanted[name]
        if len(size) == 1:
            return torch.zeros(size) if name.endswith(".bias") else torch.ones(size)
        generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
        width = std / math.sqrt(2 * shape.layers) if name in residual else std
        return torch.randn(size, generator=generator) * width

    return get
