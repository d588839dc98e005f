"""Specs of named tensors (dtype, shape, bytes), safetensors files written. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]  # (start, length) along one dimension of a full tensor
# torch's name -> (safetensors' name, bytes of an element), in the order in which that library lays
# tensors out
DTYPES = {
    "int64": ("I64", 8),
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "int16": ("I16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclass(frozen=True)
class TensorSpec:
    name: str
    dtype: str  # as torch calls it
    shape: Shape

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return cls(name, dtype_name(tensor.dtype), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return DTYPES[self.dtype][1] * math.prod(self.shape)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name out of a file or a message, which may be one of the table's alone."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(DTYPES)}")
    return getattr(torch, name)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as one dimension of bytes."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1)
    if not flat.numel():  # whose stride may be 0
        return torch.empty(0, dtype=torch.uint8, device=flat.device)
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def write_tensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the usual permissions; the library makes it owner-only."""
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata=metadata)
    path.chmod(mode & 0o777)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a safetensors file."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
