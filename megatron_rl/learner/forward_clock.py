"""What the forward passes inside an update cost: on a GPU, asked of the GPU once it is through with them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class ForwardClock:
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
