"""Allocator setting that lets the learner return GPU memory at syncs to an engine that has slept,
and a clock for the forward passes inside an update.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_rl.config.schema import Sleep, Transport

GIVEN = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SETTINGS = "expandable_segments:True"


def keep_returnable(sleep: Sleep, transport: Transport) -> None:
    """Let torch return memory where an engine takes its share back at every sync; to be called
    before any allocation.

    Packs differ in length, so that plain segments stay half used, and those cannot be returned. Not
    told to the engine's process, which keeps what sleeps in a pool; not under `ipc`, which shares
    plain segments; not against the environment.
    """
    if (
        sleep == Sleep.none
        or transport != Transport.file
        or any(os.environ.get(name) for name in GIVEN)
    ):
        return
    torch._C._accelerator_setAllocatorSettings(SETTINGS)


class ForwardClock:
    """Time of the forward passes inside an update: on a GPU, asked of the GPU once it is through
    with them.
    """

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
        seconds = self._seconds
        self._seconds = 0.0
        self._spans = []
        return seconds
