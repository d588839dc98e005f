"""Matrix products of BF16, INT8 and FP8 on CPUs, computed in FP32 if the processor lacks
instructions for them; codes and scales of activations, and rounding to BF16, equal to those of
vLLM's CPU kernels.

BF16: exact products, sums in FP32, one rounding; torch by itself would be ten times slower than in
FP32 (docs/design/learner-on-cpu.md). INT8: sums are exact in any order, as long as they stay below
2^24. FP8: products are exact; the order of the sums affects at most one output in ten thousand.

Shapes: M tokens, K input features, N output features.
"""

import functools
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.processes import instructions
from megatron_rl.quantization import vllm_operators
from megatron_rl.quantization.formats import FP8_MAX, INT8_MAX

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
CPU_FLAGS = Path("/proc/cpuinfo")
# keeps the libraries alive, and with them their kernels
_REGISTERED: list[torch.library.Library] = []


def has_bf16() -> bool:
    """True if this processor multiplies BF16 by instructions that torch uses."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True  # not known to be slow
    there = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return there and not instructions.limit("bf16")


def has_fp8() -> bool:
    """True if vLLM multiplies FP8 by this processor's instructions, unlike `Fp8Weight`."""
    return CPU_FLAGS.exists() and "amx_fp8" in CPU_FLAGS.read_text().split()


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert FP32 values as vLLM's CPU kernels store them (rotary embedding, attention): truncated
    if the processor has no instruction that rounds to BF16.
    """
    rounded = torch.cpu._is_avx512_bf16_supported() or x.device.type != "cpu"
    if rounded or (x.dtype, dtype) != (torch.float32, torch.bfloat16):
        return x.to(dtype)
    return x.contiguous().view(torch.bfloat16)[..., 1::2].contiguous()


@functools.cache
def install() -> None:
    """Replace torch's products by these in the whole process."""
    if torch.cuda.is_available() or has_bf16():
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):  # torch warns about the overridden kernel
        for name in PRODUCTS:
            library.impl(
                name, _through_fp32(getattr(torch.ops.aten, name).out), "CPU", allow_override=True
            )
    _REGISTERED.append(library)


def _through_fp32(product: Any) -> Any:
    """Multiply BF16 in FP32 by `product`, which writes into a given tensor: torch's kernel, without
    the override.
    """

    def multiply(*matrices: Tensor, **scales: Any) -> Tensor:
        left, right = matrices[-2:]
        shape = (*left.shape[:-1], right.shape[-1])
        if left.dtype != torch.bfloat16:
            return product(*matrices, **scales, out=left.new_empty(shape))
        exact = (matrix.float() for matrix in matrices)
        return product(
            *exact,
            **scales,
            out=torch.empty(shape, dtype=torch.float32),
        ).bfloat16()

    return multiply


EXACT_K = 1 << 10  # 128 * 127 times this is below 2^24
LEAST_FP8_SCALE = 1 / (FP8_MAX * 512)  # vLLM's, for rows that are zero or almost zero
# what x86 converts to: of nothing else than zero over zero, or a negative number over it
LEAST = -128.0


@functools.cache
def has_int8() -> bool:
    """True if torch multiplies INT8 exactly here: without VNNI pairs are added in 16 bits."""
    if not (torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()):
        return False
    codes = torch.full((64, 64), INT8_MAX, dtype=torch.int8)
    return bool((torch._int_mm(codes, codes) == 64 * INT8_MAX**2).all())


def int8_scale(amax: Tensor) -> Tensor:
    return amax / INT8_MAX


def int8_codes(x_MK: Tensor, amax_M1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return codes of activations and a scale per token, as vLLM's CPU kernel computes them, by the
    reciprocal.

    `amax_M1`: the largest magnitude of each token, if other ranks hold more of its features.
    """
    if (
        amax_M1 is None
        and x_MK.dtype == torch.bfloat16
        and x_MK.numel()
        and vllm_operators.has_int8()
    ):
        return vllm_operators.int8_codes(x_MK)
    wide_MK = x_MK.float()
    scale_M1 = int8_scale(wide_MK.abs().amax(1, keepdim=True) if amax_M1 is None else amax_M1)
    inverse_M1 = 1 / scale_M1
    codes_MK = (wide_MK * inverse_M1).round_()
    # zero or almost zero: with such a scale every code is zero
    if not bool(inverse_M1.isfinite().all()):
        codes_MK.nan_to_num_(LEAST, INT8_MAX, LEAST)
    return codes_MK.to(torch.int8), scale_M1


class Int8Weight:
    """INT8 codes with a scale per output feature, for INT8 activations with a scale per token.

    Multiplied by the engine's kernel if it is installed and outputs are BF16; else by torch, or in
    FP32 on processors without INT8.
    """

    codes = staticmethod(int8_codes)
    scale = staticmethod(int8_scale)

    def __init__(self, codes_NK: Tensor, scale_N1: Tensor) -> None:
        """Use the codes without a copy where possible; they must not be changed."""
        self.n = len(codes_NK)
        if has_int8():
            self._codes_NK = codes_NK.detach().contiguous()
            self._parts = []
        else:
            self._codes_NK = codes_NK.new_empty(0)
            self._parts = [part.float() for part in codes_NK.split(EXACT_K, dim=1)]
        self._scale_N = scale_N1.detach().reshape(-1).clone()

    @functools.cached_property
    def _kernel(self) -> vllm_operators.Int8Kernel:
        return vllm_operators.Int8Kernel(self._codes_NK, self._scale_N.unsqueeze(1))

    @functools.cached_property
    def _codes_KN(self) -> Tensor:
        # with one input feature the transposed weight counts as contiguous, with strides that
        # torch._int_mm misreads
        return self._codes_NK.t().clone(memory_format=torch.contiguous_format)

    def product(
        self,
        codes_MK: Tensor,
        scale_M1: Tensor,
        bias_N: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if dtype == torch.bfloat16 and codes_MK.numel() and vllm_operators.has_int8():
            return self._kernel.product(codes_MK, scale_M1, bias_N)
        return self.scaled(self.sums(codes_MK), scale_M1, bias_N, dtype)

    def scaled(
        self,
        sums_MN: Tensor,
        scale_M1: Tensor,
        bias_N: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return outputs, scaled in the order of oneDNN's kernel, bit-equal to it."""
        out_MN = sums_MN.mul_(self._scale_N)
        if bias_N is not None:
            # one rounding, as in a fused multiply-add
            return out_MN.double().mul_(scale_M1).add_(bias_N).float().to(dtype)
        return out_MN.mul_(scale_M1).to(dtype)

    def sums(self, codes_MK: Tensor) -> Tensor:
        """Return exact sums, rounded to FP32."""
        if len(self._parts) == 1:
            return torch.nn.functional.linear(codes_MK.float(), self._parts[0])
        return self.addable_sums(codes_MK).float()

    def addable_sums(self, codes_MK: Tensor) -> Tensor:
        """Return exact sums in INT32, to be added across ranks."""
        if not self._parts:
            return torch._int_mm(codes_MK, self._codes_KN)
        total_MN = torch.zeros((len(codes_MK), self.n), dtype=torch.int32)
        for some, part in zip(codes_MK.split(EXACT_K, dim=1), self._parts, strict=True):
            total_MN += torch.nn.functional.linear(some.float(), part).to(torch.int32)
        return total_MN


def fp8_scale(amax: Tensor) -> Tensor:
    return (amax / FP8_MAX).clamp(min=LEAST_FP8_SCALE)


def fp8_codes(x_MK: Tensor, amax_M1: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return FP8 codes of activations and a scale per token, as for vLLM's CPU kernels."""
    scale_M1 = fp8_scale(x_MK.abs().amax(1, keepdim=True).float() if amax_M1 is None else amax_M1)
    # the largest value of a row may exceed FP8's maximum by a rounding
    codes_MK = (x_MK.float() * scale_M1.reciprocal()).clamp_(-FP8_MAX, FP8_MAX)
    return codes_MK.to(torch.float8_e4m3fn), scale_M1


class Fp8Weight:
    """FP8 codes with a scale per output feature, for FP8 activations with a scale per token.

    The codes are held in the type that this processor multiplies fastest.
    """

    codes = staticmethod(fp8_codes)
    scale = staticmethod(fp8_scale)

    def __init__(self, codes_NK: Tensor, scale_N1: Tensor) -> None:
        self.n = len(codes_NK)
        held = torch.bfloat16 if has_bf16() else torch.float32
        self._codes_NK = codes_NK.to(held, memory_format=torch.contiguous_format)
        self._scale_N = scale_N1.detach().reshape(-1).clone()

    def product(
        self,
        codes_MK: Tensor,
        scale_M1: Tensor,
        bias_N: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        if dtype == self._codes_NK.dtype:
            sums_MN = torch.nn.functional.linear(codes_MK.to(dtype), self._codes_NK)
        else:
            sums_MN = self.addable_sums(codes_MK)
        return self.scaled(sums_MN, scale_M1, bias_N, dtype)

    def scaled(
        self,
        sums_MN: Tensor,
        scale_M1: Tensor,
        bias_N: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return outputs: rounded sums, then scaled in FP32, the token's scale first."""
        out_MN = (sums_MN.to(dtype) * scale_M1).mul_(self._scale_N)
        if bias_N is not None:
            out_MN += bias_N
        return out_MN.to(dtype)

    def addable_sums(self, codes_MK: Tensor) -> Tensor:
        """Return sums in FP32, to be added across ranks."""
        return torch.nn.functional.linear(codes_MK.float(), self._codes_NK.float())


SampledWeight = Int8Weight | Fp8Weight
