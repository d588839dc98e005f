"""vLLM's INT8 kernel for hosts, in a process without vLLM. A weight is packed once.

Shapes: M tokens, K input features, N output features.
"""

from __future__ import annotations

import functools
import weakref

import torch

from megatron_rl.quantization import engine_library

PRIMITIVES = 32  # of oneDNN, kept for each weight: one for every number of tokens seen lately
SUMS = 3 << 18  # FP32: three megabytes
NEEDED = ("create_onednn_scaled_mm_handler", "onednn_scaled_mm", "release_dnnl_matmul_handler")


@functools.cache
def is_here() -> bool:
    """Whether vLLM's build for hosts is installed, and its INT8 products are exact on this processor."""
    return torch.cpu._is_vnni_supported() and engine_library.has(*NEEDED) and is_exact()


def is_exact() -> bool:
    """Pairs of such products do not fit into 16 bits."""
    codes = torch.full((16, 64), 127, dtype=torch.int8, device="cpu")
    ones = torch.ones((16, 1), dtype=torch.float32, device="cpu")
    sums = Int8Kernel(codes, ones, torch.float32).product(codes, ones, None)
    return bool((sums == 127 * 127 * 64).all())


def codes(x_MK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of activations, with a scale per token."""
    codes_MK = torch.empty(x_MK.shape, dtype=torch.int8)
    scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
    torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, None)
    return codes_MK, scale_M1


class Int8Kernel:
    """A packed weight."""

    def __init__(self, codes_NK: torch.Tensor, scale_N1: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        """`dtype`: of the outputs."""
        operators = torch.ops._C
        self._n, self._dtype = len(codes_NK), dtype
        handle = operators.create_onednn_scaled_mm_handler(
            codes_NK.contiguous().t(), scale_N1.float().contiguous(), dtype, True, False, PRIMITIVES
        )
        self._handle = torch.tensor(handle, dtype=torch.int64, device="cpu")
        weakref.finalize(self, operators.release_dnnl_matmul_handler, handle).atexit = False

    def product(self, codes_MK: torch.Tensor, scale_M1: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
        out_MN = torch.empty((len(codes_MK), self._n), dtype=self._dtype, device=codes_MK.device)
        # sums are stored in FP32 before they are scaled: those of some rows at a time, which the cache still holds
        at_once = max(1, SUMS // self._n)
        for out, codes, scale in zip(*(rows.split(at_once) for rows in (out_MN, codes_MK, scale_M1)), strict=True):
            torch.ops._C.onednn_scaled_mm(out, codes, scale, None, None, bias_N, self._handle)
        return out_MN
