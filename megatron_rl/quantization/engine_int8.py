"""vLLM's INT8 kernel for hosts in a process without vLLM: its library of operators alone, loaded in a twentieth of a
second. A weight is packed once; scales are applied while outputs are in the processor's cache.

Shapes: M tokens, K input features, N output features.
"""

from __future__ import annotations

import functools
import importlib.util
import platform
import weakref
from pathlib import Path

import torch

PRIMITIVES = 32  # of oneDNN, kept for each weight: one for every number of tokens seen lately
NEEDED = ("create_onednn_scaled_mm_handler", "onednn_scaled_mm", "release_dnnl_matmul_handler")


@functools.cache
def is_here() -> bool:
    """Whether vLLM's build for hosts is installed, and its INT8 products are exact on this processor."""
    if platform.machine() not in ("x86_64", "AMD64") or not torch.cpu._is_vnni_supported():
        return False
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False  # another build of vLLM, with other operators of the same names
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(found.origin).with_name(_library())))
    except OSError:
        return False
    return all(hasattr(torch.ops._C, name) for name in NEEDED) and is_exact()


def _library() -> str:
    """Of several, by the processor, as vLLM chooses."""
    if torch.cpu._is_avx512_bf16_supported():
        return "_C.abi3.so"
    return "_C_AVX512.abi3.so" if torch.cpu._is_avx512_supported() else "_C_AVX2.abi3.so"


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
        torch.ops._C.onednn_scaled_mm(out_MN, codes_MK, scale_M1, None, None, bias_N, self._handle)
        return out_MN
