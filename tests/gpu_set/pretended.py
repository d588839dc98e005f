"""A GPU as torch and vLLM would describe it, on a machine without one. Nothing can be computed there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

CONSTRUCTORS = ("tensor", "zeros", "ones", "empty", "full", "arange", "empty_like", "zeros_like", "ones_like")


@dataclass(frozen=True)
class Device:
    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 132
    uuid: str = "GPU-pretended"
    warp_size: int = 32

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


H100 = Device("NVIDIA H100 80GB HBM3", 9, 0, 80 << 30)
B200 = Device("NVIDIA B200", 10, 0, 180 << 30, multi_processor_count=148)


def pretend(patch: pytest.MonkeyPatch, device: Device, count: int = 8) -> None:
    """torch.cuda answers as if `count` such devices were here."""
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: 0,
        "get_device_capability": lambda device_=None: device.capability,
        "get_device_name": lambda device_=None: device.name,
        "get_device_properties": lambda device_=None: device,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    patch.setattr(torch.accelerator, "device_count", lambda: count)


def tensors_on_host(patch: pytest.MonkeyPatch) -> None:
    """What asks for a tensor on the device gets one in host memory."""

    def placed(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(constructor)
        def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = kwargs.get("device")
            if isinstance(wanted, int) or str(wanted).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return constructor(*args, **kwargs)

        return construct

    with torch.device("cpu"):  # remembers, at its first use, which functions are constructors: the true ones
        torch.empty(0)
    for name in CONSTRUCTORS:
        patch.setattr(torch, name, placed(getattr(torch, name)))


def vllm_platform(patch: pytest.MonkeyPatch) -> None:
    """vLLM decides by its platform, once: that of a CUDA device whose properties torch tells."""
    import vllm.platforms
    from vllm.platforms import cuda

    patch.setattr(vllm.platforms, "_current_platform", cuda.NonNvmlCudaPlatform())
