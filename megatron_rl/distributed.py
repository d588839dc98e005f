"""What ranks tell each other beside tensors: JSON. Nothing that another process sent is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


def exchange(value: Any) -> list[Any]:
    """Every rank's JSON value, in rank order, on every rank. Tuples arrive as lists, on the sender too."""
    text = json.dumps(value)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(text)]
    world = dist.get_world_size()
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    sizes = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]))
    width = int(sizes.max())
    every = torch.zeros(world * width, dtype=torch.uint8)
    dist.all_gather_into_tensor(every, torch.cat((data, data.new_zeros(width - len(data)))))
    rows = every.view(world, width)
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]
