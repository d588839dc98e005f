"""A copy of a model that computes the same function with outliers in its activations, as large
models have them: what INT8 is coarse on.

The inverse of smoothing: channels of each norm's output are multiplied by a power of two, and the
columns of everything that reads them divided by it. H hidden channels.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rl.models.hf_folder import HfFolder, copy_companions, write_folder
from megatron_rl.models.mapping import params
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape


def with_outliers(origin: Path, folder: Path, factor: int, channels: int) -> None:
    """`channels` of each norm's output are `factor` times as large, a power of two: exact in
    BF16.
    """
    source = HfFolder(origin)
    card = read_hf_config(origin)
    shape = ModelShape.from_hf(card)
    scale_H = torch.ones(shape.hidden, dtype=torch.float32)
    scale_H[:: -(-shape.hidden // channels)] = factor
    tensors = {name: source.get(name) for name in source.names}
    for param in params(shape):
        if param.row.norm is None:
            continue
        for name in param.hf:
            wide = tensors[name].float()
            tensors[name] = (wide * scale_H if wide.ndim == 1 else wide / scale_H).to(
                tensors[name].dtype
            )
    copy_companions(origin, folder)
    write_folder(
        folder,
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        card,
    )
