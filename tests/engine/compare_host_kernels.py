"""Prints, as JSON, how far our host kernels are from the vLLM kernels they replace, and which attention is chosen.

A process of its own: vLLM changes the threads and settings of whoever imports it.
"""

import json

import torch
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS as FP8_KERNELS
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS as INT8_KERNELS
from vllm.model_executor.kernels.linear import FP8ScaledMMLinearLayerConfig, choose_scaled_mm_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import ChannelWiseTorchFP8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym, kFp8StaticChannelSym
from vllm.v1.attention.backends import cpu_attn

from megatron_rl.config.schema import Format
from megatron_rl.engine import host_kernels
from megatron_rl.quantization.host_products import Int8Weight, int8_codes
from megatron_rl.quantization.quantize import quantize

NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
FP8_NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]


def layer_with(tensors: dict[str, torch.Tensor], transposed: bool, bias: torch.Tensor) -> torch.nn.Module:
    layer = torch.nn.Module()
    weight = tensors["weight"].t() if transposed else tensors["weight"].clone()
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(tensors["weight_scale"].clone(), requires_grad=False)
    layer.params_dtype = torch.bfloat16
    layer.logical_widths = [tensors["weight"].shape[0]]
    layer.bias = torch.nn.Parameter(bias.clone(), requires_grad=False)
    for name in ("input_scale", "input_scale_ub", "input_zero_point", "azp_adj"):
        layer.register_parameter(name, None)
    return layer


class OneDnnInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's own, also where the processor has AMX tiles and vLLM would take another."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.linear_method = self._apply_weights_onednn
        self.process_weights_for_onednn(layer)


def outputs_of(kernel, layer: torch.nn.Module, inputs: list[torch.Tensor], bias: torch.Tensor) -> list[torch.Tensor]:
    kernel.process_weights_after_loading(layer)
    return [kernel.apply_weights(layer, x, b) for x in inputs for b in (None, bias)]


def exactly(int8: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What W8A8 is, in sums that cannot overflow: the order of the scales is oneDNN's."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    codes = (x.float() * (1 / scale)).round()
    sums = codes.double() @ int8["weight"].t().double()
    out = sums.float() * int8["weight_scale"].reshape(-1) * scale
    return (out if bias is None else out + bias).to(x.dtype)


def of_the_learner(
    tensors: dict[str, torch.Tensor], inputs: list[torch.Tensor], bias: torch.Tensor
) -> list[torch.Tensor]:
    """As `learner.forward=as_sampler` computes it."""
    weight = Int8Weight(tensors["weight"], tensors["weight_scale"])
    return [weight.product(*int8_codes(x), b, x.dtype) for x in inputs for b in (None, bias)]


def odd_inputs(features: int) -> torch.Tensor:
    """Rows that rounding may treat apart: ties, zeros, one huge value, subnormals, one sign, the smallest steps."""
    rows = torch.randn(9, features)
    rows[0] = torch.arange(features) % 255 - 127 + 0.5  # ties, once scaled
    rows[0, 0] = 127
    rows[1] = 0
    rows[2, 5] = 1e30
    rows[3] *= 1e-39
    rows[4] = rows[4].abs()
    rows[5] = -rows[5].abs()
    rows[6] = 1.0
    rows[7, ::2] = 0
    rows[8] = torch.linspace(-1, 1, features)
    return rows


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """To the last bit, but for tokens below the normal numbers: processors differ in the codes that overflow there."""
    return bool(((a == b) | ((a.float() - b.float()).abs() < 1e-36)).all())


def relative(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(a, b, strict=True))


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    weight_OI = torch.randn(320, 192) * torch.logspace(-3, 1, 320).unsqueeze(1)
    inputs = [torch.randn(m, 192) * torch.logspace(-2, 2, m).unsqueeze(1) for m in (1, 3, 40)]
    bias = torch.randn(320)
    fp8 = quantize(weight_OI, Format.fp8)
    int8 = quantize(weight_OI, Format.int8)
    config = FP8ScaledMMLinearLayerConfig(
        weight_quant_key=kFp8StaticChannelSym,
        activation_quant_key=kFp8DynamicTokenSym,
        weight_shape=(320, 192),
        input_dtype=torch.bfloat16,
        out_dtype=torch.bfloat16,
    )
    int8_config = Int8ScaledMMLinearLayerConfig(is_static_input_scheme=False, is_channelwise=True, input_symmetric=True)
    attention = torch.bfloat16, 128, 64  # dtype, tokens of a cache block, size of a head
    vllms_attention = host_kernels._vllms_choice(*attention)
    host_kernels.install()
    host_kernels.install()
    chosen = choose_scaled_mm_linear_kernel(config, FP8_KERNELS, quantization="fp8_w8a8")
    chosen_int8 = choose_scaled_mm_linear_kernel(int8_config, INT8_KERNELS, quantization="int8_w8a8")
    fast = outputs_of(chosen(config, FP8_NAMES), layer_with(fp8, True, bias), inputs, bias)
    slow_kernel = ChannelWiseTorchFP8ScaledMMLinearKernel(config, FP8_NAMES)
    slow = outputs_of(slow_kernel, layer_with(fp8, True, bias), inputs, bias)
    unrounded = [x @ weight_OI.t() + b for x in inputs for b in (torch.zeros(320), bias)]
    mine = outputs_of(chosen_int8(int8_config, NAMES), layer_with(int8, False, bias), inputs, bias)
    exact = [exactly(int8, x, b) for x in inputs for b in (None, bias)]
    long = quantize(torch.randn(320, 2500), Format.int8)
    learner_equal = True
    for tensors, odd in ((int8, odd_inputs(192)), (long, odd_inputs(2500))):
        engine = outputs_of(chosen_int8(int8_config, NAMES), layer_with(tensors, False, bias), [odd], bias)
        learner_equal &= all(map(same, engine, of_the_learner(tensors, [odd], bias)))
    learner_equal &= all(map(same, mine, of_the_learner(int8, inputs, bias)))
    theirs = outputs_of(OneDnnInt8Kernel(int8_config, NAMES), layer_with(int8, False, bias), inputs, bias)
    print(
        json.dumps(
            {
                "fp8_kernel": chosen.__name__,
                "fp8_fast_to_slow": relative(fast, slow),
                "fp8_slow_to_bf16": relative(slow, unrounded),
                "int8_kernel": chosen_int8.__name__,
                "int8_is_exact": all(torch.equal(a, b) for a, b in zip(mine, exact, strict=True)),
                "int8_equal": all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)),
                "learner_equal": learner_equal,
                "onednn_is_exact": host_kernels.products_are_exact(),
                "has_tiles": torch.cpu._is_amx_tile_supported(),
                "attention": [vllms_attention, cpu_attn._get_attn_isa(*attention)],
                "shapes_equal": [tuple(x.shape) for x in fast] == [tuple(x.shape) for x in slow],
            }
        )
    )


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))):
        main()
