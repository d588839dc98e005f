"""A rank's device: small tensors go there in one copy, its memory can be returned, its forward passes are timed."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_rl.config.schema import Sleep, Transport

ALIGNMENT = 64  # bytes: of every tensor's place, so that any dtype may be read there
GIVEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def in_one_copy(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on the device, views of one buffer: a copy each would cost more than what is in it.

    On a host they are there already, and nothing is copied.
    """
    if device.type == "cpu":
        return dict(tensors)
    return views(buffer(tensors).to(device), tensors)


def buffer(tensors: Mapping[str, Tensor]) -> Tensor:
    """The bytes of all tensors, one after the other."""
    nbytes = sum(_room(tensor) for tensor in tensors.values())
    held, start = torch.empty(nbytes, dtype=torch.uint8), 0
    for tensor in tensors.values():
        held[start : start + tensor.nbytes].copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
        start += _room(tensor)
    return held


def views(held: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `buffer` has put into `held`."""
    found, start = {}, 0
    for name, tensor in like.items():
        found[name] = held[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        start += _room(tensor)
    return found


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT


def keep_returnable(sleep: Sleep, transport: Transport) -> None:
    """Let torch return memory, where an engine takes its share back at every sync; to be called before any allocation.

    Packs differ in length, so that segments of torch's allocator stay half used, and those cannot be returned. Segments
    that grow and shrink by pages can. The engine's process is not told: vLLM keeps what sleeps in a pool without them.
    What the environment says of the allocator stays; `ipc` shares plain segments.
    """
    if sleep == Sleep.none or transport != Transport.file or any(os.environ.get(name) for name in GIVEN):
        return
    torch._C._accelerator_setAllocatorSettings(SETTINGS)


class ForwardClock:
    """Time of the forward passes inside an update: on a GPU, asked of the GPU once it is through with them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = 0.0
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        if not self._on_gpu:
            begun = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begun
            return
        span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        span[0].record()
        yield
        span[1].record()
        self._spans.append(span)

    def take(self) -> float:
        """Seconds since the last call."""
        for begun, ended in self._spans:
            ended.synchronize()
            self._seconds += begun.elapsed_time(ended) / 1000
        seconds, self._seconds, self._spans = self._seconds, 0.0, []
        return seconds
