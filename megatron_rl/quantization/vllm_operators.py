"""vLLM's CPU operators for the learner, without an import of vLLM: INT8 products, rotary embedding.

An engine's worker only tests whether INT8 products are exact (engine/cpu_kernels.py). The library
loads in 0.05 s; INT8 weights are packed once. No other module calls `torch.ops._C`.

Shapes: M tokens, K input features, N output features, S positions, A heads of width D.
"""

import functools
import importlib.util
import platform
import weakref
from pathlib import Path

import torch
from torch import Tensor

PRIMITIVES = 32  # oneDNN primitives cached for each weight: one per recent number of tokens
SUMS = 3 << 18  # FP32: three megabytes
INT8_OPERATORS = (
    "create_onednn_scaled_mm_handler",
    "onednn_scaled_mm",
    "release_dnnl_matmul_handler",
)


@functools.cache
def _is_loaded() -> bool:
    if platform.machine() not in ("x86_64", "AMD64"):
        return False
    if torch.version.cuda is not None or torch.version.hip is not None:
        return False  # another build of vLLM, with different operators of the same names
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return False
    if torch.cpu._is_avx512_supported():
        library = "_C_AVX512.abi3.so"
    else:
        library = "_C_AVX2.abi3.so"
    # of several kernels, by the processor, as vLLM chooses
    if torch.cpu._is_avx512_bf16_supported():
        library = "_C.abi3.so"
    try:
        torch.ops.load_library(str(Path(found.origin).with_name(library)))
    except OSError:
        return False
    return True


def _has(*operators: str) -> bool:
    """True if vLLM's build for CPUs is installed with these operators."""
    return _is_loaded() and all(hasattr(torch.ops._C, name) for name in operators)


@functools.cache
def has_int8() -> bool:
    """True if INT8 products are available, and exact on this processor."""
    return torch.cpu._is_vnni_supported() and _has(*INT8_OPERATORS) and int8_is_exact()


def int8_is_exact() -> bool:
    """True if pairs of products are summed in more than 16 bits, where they could overflow."""
    codes = torch.full((16, 64), 127, dtype=torch.int8, device="cpu")
    ones = torch.ones((16, 1), dtype=torch.float32, device="cpu")
    sums = Int8Kernel(codes, ones, torch.float32).product(codes, ones, None)
    return bool((sums == 127 * 127 * 64).all())


def int8_codes(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of activations, and a scale per token."""
    codes_MK = torch.empty(x_MK.shape, dtype=torch.int8)
    scale_M1 = torch.empty((len(x_MK), 1), dtype=torch.float32)
    torch.ops._C.dynamic_scaled_int8_quant(codes_MK, x_MK.contiguous(), scale_M1, None)
    return codes_MK, scale_M1


class Int8Kernel:
    """Packed weight of an INT8 kernel."""

    def __init__(
        self, codes_NK: Tensor, scale_N1: Tensor, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """`dtype`: of the outputs."""
        operators = torch.ops._C
        self._n = len(codes_NK)
        self._dtype = dtype
        handle = operators.create_onednn_scaled_mm_handler(
            codes_NK.contiguous().t(), scale_N1.float().contiguous(), dtype, True, False, PRIMITIVES
        )
        self._handle = torch.tensor(handle, dtype=torch.int64, device="cpu")
        weakref.finalize(self, operators.release_dnnl_matmul_handler, handle).atexit = False

    def product(self, codes_MK: Tensor, scale_M1: Tensor, bias_N: Tensor | None) -> Tensor:
        out_MN = torch.empty(
            (len(codes_MK), self._n),
            dtype=self._dtype,
            device=codes_MK.device,
        )
        # sums are stored in FP32 before they are scaled: some rows at a time, to stay in the cache
        at_once = max(1, SUMS // self._n)
        for out, codes, scale in zip(
            *(rows.split(at_once) for rows in (out_MN, codes_MK, scale_M1)), strict=True
        ):
            torch.ops._C.onednn_scaled_mm(out, codes, scale, None, None, bias_N, self._handle)
        return out_MN


def has_rotary() -> bool:
    return _has("rotary_embedding")


def rotary(x_S1AD: Tensor, turns_SD: Tensor) -> Tensor:
    """Rotate each position by its row of `turns_SD`: cosines of its angles, then sines."""
    out_S1AD = x_S1AD.clone(memory_format=torch.contiguous_format)
    positions_S = torch.arange(len(turns_SD), device="cpu")
    rows = out_S1AD.view(len(turns_SD), -1)
    head = out_S1AD.shape[-1]
    torch.ops._C.rotary_embedding(positions_S, rows, None, head, turns_SD, True)
    return out_S1AD
