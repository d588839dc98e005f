"""BF16 matrix products on processors without BF16 instructions: multiplied in FP32, rounded once.

That is what a BF16 product is: exact products, sums in FP32, one rounding. Where the processor cannot do it by itself,
torch multiplies BF16 ten times slower than FP32 (docs/decisions/host_kernels.md has the figures).
"""

from __future__ import annotations

import functools
import platform
import warnings
from typing import Any

import torch

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_REGISTERED: list[torch.library.Library] = []  # a kernel lives as long as its library


def has_bf16() -> bool:
    """Whether this processor multiplies BF16 itself."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not known to be slow
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


@functools.cache
def install() -> None:
    """Puts them in front of torch's own, for the whole process."""
    if torch.cuda.is_available() or has_bf16():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch says that it had one before
        for name in PRODUCTS:
            library.impl(name, _through_fp32(getattr(torch.ops.aten, name).out), "CPU", allow_override=True)
    _REGISTERED.append(library)


def _through_fp32(product: Any) -> Any:
    """`product` writes into a given tensor: that is torch's own kernel, which nothing is in front of."""

    def multiply(*matrices: torch.Tensor, **scales: Any) -> torch.Tensor:
        left, right = matrices[-2:]
        shape = (*left.shape[:-1], right.shape[-1])
        if left.dtype != torch.bfloat16:
            return product(*matrices, **scales, out=left.new_empty(shape))
        exact = (matrix.float() for matrix in matrices)
        return product(*exact, **scales, out=torch.empty(shape, dtype=torch.float32)).bfloat16()

    return multiply
