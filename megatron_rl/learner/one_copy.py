"""Many small tensors to a device at the price of one: a copy each would cost more than what is in it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ALIGNMENT = 64  # bytes: of every tensor's place, so that any dtype may be read there


def in_one_copy(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same on the device, views of one buffer. On a host they are there already, and nothing is copied."""
    if device.type == "cpu":
        return dict(tensors)
    return views(buffer(tensors).to(device), tensors)


def buffer(tensors: Mapping[str, Tensor]) -> Tensor:
    """All their bytes, one after the other."""
    nbytes = sum(_room(tensor) for tensor in tensors.values())
    held, start = torch.empty(nbytes, dtype=torch.uint8), 0
    for tensor in tensors.values():
        held[start : start + tensor.nbytes].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        start += _room(tensor)
    return held


def views(held: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `buffer` has put there."""
    found, start = {}, 0
    for name, tensor in like.items():
        found[name] = held[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
