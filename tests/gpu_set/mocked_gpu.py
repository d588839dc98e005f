"""Mocked GPU for torch and vLLM on a CPU-only machine. No kernel can run on it."""

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

STUB = Path(__file__).parents[2] / "build" / "gpu_set" / "libcuda.so.1"
# of a model that CUDA kernels take: whole tiles, whole heads
SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "vocab_size": 128,
    "dtype": "bfloat16",
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE, of any function
CONSTRUCTORS = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "empty_like",
    "zeros_like",
    "ones_like",
)


@dataclass(frozen=True)
class Device:
    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 132
    uuid: str = "GPU-mocked"
    warp_size: int = 32

    @property
    def capability(self) -> tuple[int, int]:
        return self.major, self.minor


H100 = Device("NVIDIA H100 80GB HBM3", 9, 0, 80 << 30)
B200 = Device("NVIDIA B200", 10, 0, 180 << 30, multi_processor_count=148)


@functools.cache
def load_driver() -> str:
    """Load the CUDA driver, or a stub that returns "no device"; return its library."""
    try:
        ctypes.CDLL(STUB.name)
        return STUB.name
    except OSError:
        if not STUB.is_file():
            _compile()
        # what is loaded later and names libcuda.so.1 gets this one, by its soname
        ctypes.CDLL(str(STUB), mode=ctypes.RTLD_GLOBAL)
        return str(STUB)


def environment(*helpers: Path) -> dict[str, str]:
    """Return the environment of a process that needs the driver from its first import on."""
    return {
        **os.environ,
        "LD_PRELOAD": load_driver(),
        "PYTHONPATH": os.pathsep.join(map(str, helpers)),
    }


def _compile() -> None:
    """Compile a C stub of every driver function that the installed libraries reference."""
    places = [find_spec(name) for name in ("nccl", "transformer_engine", "vllm")]
    folders = [
        folder for place in places if place for folder in place.submodule_search_locations or ()
    ]
    libraries = [str(path) for folder in folders for path in Path(folder).rglob("*.so*")]
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True
    ).stdout
    named = {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.strip()}
    wanted = {"cuInit"} | {name for name in named if name.startswith("cu") and name[2:3].isupper()}
    STUB.parent.mkdir(parents=True, exist_ok=True)
    source = STUB.with_name("libcuda.c")
    source.write_text(
        "".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in sorted(wanted))
    )
    flags = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{STUB.name}"]
    subprocess.run(["cc", *flags, str(source), "-o", str(STUB)], check=True)


def pretend(patch: pytest.MonkeyPatch, device: Device, count: int = 8) -> None:
    """Patch torch.cuda to report `count` such devices."""
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
    """Create tensors in CPU memory where a CUDA device is requested."""

    def placed(constructor: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(constructor)
        def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
            wanted = kwargs.get("device")
            if isinstance(wanted, int) or str(wanted).startswith("cuda"):
                kwargs["device"] = torch.device("cpu")
            return constructor(*args, **kwargs)

        return construct

    # remembers, at its first use, which functions are constructors: the true ones
    with torch.device("cpu"):
        torch.empty(0)
    for name in CONSTRUCTORS:
        patch.setattr(torch, name, placed(getattr(torch, name)))


def vllm_platform() -> None:
    """For all of this process, before anything of vLLM is imported: a CUDA platform whose
    properties torch tells.
    """
    import vllm.platforms
    from vllm.platforms import cuda

    vars(vllm.platforms)["_current_platform"] = cuda.NonNvmlCudaPlatform()
