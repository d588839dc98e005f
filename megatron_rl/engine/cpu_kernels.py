"""Replacements for vLLM's INT8, FP8 and attention kernels on CPUs, where its choices are slow,
inexact or crash; installed in every worker (receiver.py), no-ops on GPUs.

INT8: vLLM's oneDNN kernel sums every weight column to correct for activation zero points, also
where activations are symmetric and have none. `SymmetricInt8Kernel` leaves the sum out: nothing
else differs. It uses oneDNN on every CPU, where vLLM has a second kernel for AMX tiles, so that
results do not depend on the processor. On processors without INT8 dot products (AVX2, the first
AVX-512) oneDNN adds products in pairs of 16 bits, which saturate: ordinary layers are off by more
than INT8's own rounding. There the codes are multiplied in FP32 (quantization/cpu_matmul.py).
Remove when oneDNN's products are exact everywhere.

FP8: vLLM multiplies FP8 matrices element by element on CPUs, ten times slower than BF16. Every FP8
value is exact in BF16, so `RoundedFp8Kernel` holds the FP8-rounded weight as BF16, rounds
activations to FP8 as vLLM does, and multiplies in BF16 with FP32 accumulation. The numbers agree up
to one more BF16 rounding of the output. oneDNN has no BF16 products for processors without AVX-512:
there FP8 values are held and multiplied in FP32 (cpu_matmul.py, as above).

Attention: vLLM 0.32's kernel for AMX tiles relies on a tile configuration that oneDNN's products
have replaced in the meantime, and ends the process with an illegal instruction on a prompt of one
token. Its AVX-512 kernel is used instead. Remove when vLLM configures its tiles at every call.

Shapes: M tokens, K input features, N output features.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS, _POSSIBLE_INT8_KERNELS
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    Int8ScaledMMLinearLayerConfig,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum
from vllm.v1.attention.backends import cpu_attn

from megatron_rl.processes import instructions
from megatron_rl.quantization import cpu_matmul, vllm_operators

# vLLM's names of its attention kernels
TILES = "amx"
VECTORS = "vec"


class SymmetricInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """W8A8 with a scale per output channel and symmetric dynamic activations."""

    dnnl_handler: Any

    @classmethod
    def can_implement(cls, c: Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        if c.is_static_input_scheme or not c.input_symmetric or not c.is_channelwise:
            return False, "takes channel-wise weights and symmetric dynamic activations only"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        if products_are_exact():
            self.process_weights_for_onednn(layer)
        else:
            self.dnnl_handler = cpu_matmul.Int8Weight(layer.weight.data, layer.weight_scale.data)
            layer.weight = None

    def process_weights_for_onednn(self, layer: Any) -> None:
        layer.weight_scale = torch.nn.Parameter(layer.weight_scale.data, requires_grad=False)
        self.dnnl_handler = ops.create_onednn_scaled_mm(
            layer.weight.t(),
            layer.weight_scale,
            layer.params_dtype,
            True,
            False,
            vllm_operators.PRIMITIVES,
        )
        layer.weight = None  # the handler holds the packed copy

    def apply_weights(self, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
        """Apply the kernel directly: vLLM keeps its choice as a bound method, a reference cycle
        that keeps the weights of old versions alive.
        """
        if isinstance(self.dnnl_handler, cpu_matmul.Int8Weight):
            return self._apply_weights_in_fp32(layer, x, bias)
        return self._apply_weights_onednn(layer, x, bias)

    def _apply_weights_in_fp32(self, layer: Any, x: Any, bias: Tensor | None) -> Tensor:
        codes_MK, scale_M1, _ = ops.onednn_scaled_int8_quant(
            x.reshape(-1, x.shape[-1]), None, None, True
        )
        out_MN = self.dnnl_handler.product(codes_MK, scale_M1, bias, x.dtype)
        return out_MN.reshape(*x.shape[:-1], self.dnnl_handler.n)


@functools.cache
def products_are_exact() -> bool:
    """Return True if this processor sums INT8 products without saturating, as oneDNN multiplies
    them here.
    """
    return vllm_operators.int8_is_exact()


class RoundedFp8Kernel(FP8ScaledMMLinearKernel):
    """FP8 values, BF16 arithmetic: weights per output channel, activations per token."""

    dnnl_handler: Any

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "runs on CPUs only"
        if ops.cpu_has_amx_fp8():
            return False, "this CPU multiplies FP8 natively"
        return True, None

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weights = c.weight_quant_key.scale
        activations = c.activation_quant_key.scale
        if activations.static or not activations.group_shape.is_per_token():
            return False, "takes dynamic activations per token only"
        if not weights.group_shape.is_per_channel() or c.out_dtype != torch.bfloat16:
            return False, "takes one weight scale per output channel and BF16 outputs only"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        weight_KN = layer.weight.data
        scale_N1 = layer.weight_scale.data
        if torch.cpu._is_avx512_supported() and not instructions.limit("bf16"):
            self.dnnl_handler = ops.create_onednn_mm(
                weight_KN.to(torch.bfloat16), vllm_operators.PRIMITIVES
            )
            self.scale_N = scale_N1.reshape(-1)
        else:
            self.dnnl_handler = cpu_matmul.Fp8Weight(weight_KN.t(), scale_N1)
        layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def apply_weights(self, layer: Any, x: Any, bias: Tensor | None = None) -> Tensor:
        rounded_MK, scale_M1 = self.quant_fp8(x.reshape(-1, x.shape[-1]))
        if isinstance(self.dnnl_handler, cpu_matmul.Fp8Weight):
            out_MN = self.dnnl_handler.product(rounded_MK, scale_M1, bias, x.dtype)
        else:
            out_MN = self._onednn_product(rounded_MK, scale_M1, bias)
        return out_MN.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _onednn_product(self, rounded_MK: Tensor, scale_M1: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply FP8 through oneDNN; equals `cpu_matmul.Fp8Weight` except for the order of the
        sums.
        """
        out_MN = ops.onednn_mm(self.dnnl_handler, rounded_MK.to(torch.bfloat16), None)
        scaled_MN = (out_MN * scale_M1).mul_(self.scale_N)
        if bias is not None:
            scaled_MN += bias
        return scaled_MN

    def apply_scaled_mm(
        self,
        *,
        A: Tensor,
        B: Tensor,
        out_dtype: torch.dtype,
        As: Tensor,
        Bs: Tensor,
        bias: Tensor | None,
        output_shape: list,
    ) -> Tensor:
        raise NotImplementedError("RoundedFp8Kernel works on prepacked weights: apply_weights")


_vllms_choice = cpu_attn._get_attn_isa


def attention_kernel(*args: Any, **kwargs: Any) -> str:
    """Return vLLM's choice for this processor, except the AMX kernel."""
    chosen = _vllms_choice(*args, **kwargs)
    return VECTORS if chosen == TILES else chosen


def install() -> None:
    """Prefer these kernels in this process, once; a no-op on GPUs."""
    if not current_platform.is_cpu():
        return
    cpu_matmul.install()
    tables: list[tuple[Any, type]] = [
        (_POSSIBLE_INT8_KERNELS, SymmetricInt8Kernel),
        (_POSSIBLE_FP8_KERNELS, RoundedFp8Kernel),
    ]
    for table, kernel in tables:
        kernels = table[PlatformEnum.CPU]
        if kernel not in kernels:
            kernels.insert(0, kernel)
    cpu_attn._get_attn_isa = attention_kernel
