"""Matrix products on processors that lack the instructions: BF16 and INT8, multiplied in FP32.

BF16: exact products, sums in FP32, one rounding. Where the processor cannot do it by itself, torch multiplies BF16 ten
times slower than FP32 (docs/decisions/host_kernels.md has the figures).

INT8: sums of INT8 products are exact whatever their order, in FP32 as well, as long as they stay below 2^24.

Shapes: M tokens, K input features, N output features.
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


EXACT_K = 1 << 10  # 127 * 127 times so many stays below 2^24


class Int8Weight:
    """A weight of INT8 codes with a scale per output feature, held in FP32, for INT8 activations with one per token."""

    def __init__(self, codes_NK: torch.Tensor, scale_N1: torch.Tensor) -> None:
        self.n = len(codes_NK)
        self._parts = [part.to(torch.float32, copy=True) for part in codes_NK.split(EXACT_K, dim=1)]
        self._scale_N = scale_N1.detach().reshape(-1).clone()

    def product(
        self, codes_MK: torch.Tensor, scale_M1: torch.Tensor, bias_N: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """The scales in the order of oneDNN's kernel, so that the outputs are its own to the last bit."""
        out_MN = self.sums(codes_MK).mul_(self._scale_N).mul_(scale_M1)
        if bias_N is not None:
            out_MN += bias_N
        return out_MN.to(dtype)

    def sums(self, codes_MK: torch.Tensor) -> torch.Tensor:
        """Exact, then rounded to FP32."""
        codes = codes_MK.split(EXACT_K, dim=1)
        sums = (torch.nn.functional.linear(some.float(), part) for some, part in zip(codes, self._parts, strict=True))
        first = next(sums)
        if len(self._parts) == 1:
            return first
        total_MN = first.to(torch.int32)
        for more in sums:
            total_MN += more.to(torch.int32)
        return total_MN.float()
