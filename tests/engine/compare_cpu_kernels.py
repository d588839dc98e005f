"""Print as JSON the distance of the CPU kernels from the vLLM kernels that they replace, the
differences to the learner's layers, and the attention that is chosen.

Runs in a separate process: vLLM changes the threads and settings of the process that imports it.
"""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from vllm import _custom_ops as ops
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import _POSSIBLE_FP8_KERNELS as FP8_KERNELS
from vllm.model_executor.kernels.linear import _POSSIBLE_INT8_KERNELS as INT8_KERNELS
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearLayerConfig,
    choose_scaled_mm_linear_kernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.pytorch import (
    ChannelWiseTorchFP8ScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
)
from vllm.v1.attention.backends import cpu_attn

from megatron_rl.config.schema import Format
from megatron_rl.engine import cpu_kernels
from megatron_rl.quantization import vllm_operators
from megatron_rl.quantization.cpu_matmul import Fp8Weight, Int8Weight
from megatron_rl.quantization.quantize import quantize, row_amax

NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
FP8_NAMES = ["weight", "weight_scale", "input_scale", "input_scale_ub"]
NORMAL = 1e-36  # nothing is made of what lies below


class Layer(torch.nn.Module):
    """A layer that one of vLLM's kernels computes."""

    def __init__(self, kernel: Any, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.kernel = kernel
        self.params_dtype = torch.bfloat16
        self.logical_widths = [len(tensors["weight"])]
        integer = tensors["weight"].dtype == torch.int8
        weight = tensors["weight"].clone() if integer else tensors["weight"].t()
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.weight_scale = torch.nn.Parameter(tensors["weight_scale"].clone(), requires_grad=False)
        for name in ("input_scale", "input_scale_ub", "input_zero_point", "azp_adj", "bias"):
            self.register_parameter(name, None)
        kernel.process_weights_after_loading(self)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernel.apply_weights(self, x, bias)


def exactly(
    int8: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """W8A8 in sums that cannot overflow, with the scales in oneDNN's order: the token's and the
    bias in one fused multiply-add.
    """
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    codes = (x.float() * (1 / scale)).round()
    sums = codes.double() @ int8["weight"].t().double()
    out = (sums.float() * int8["weight_scale"].reshape(-1)).double() * scale
    return (out if bias is None else out + bias).float().to(x.dtype)


ODD = {
    "ties of INT8": lambda x: (torch.arange(len(x)) % 255 - 126.5).index_fill(
        0, torch.tensor(0), 127
    ),
    "ties of FP8": lambda x: (17 + 2 * torch.arange(len(x)) % 16).index_fill(
        0, torch.tensor(0), 448
    ),
    "zeros": lambda x: 0 * x,
    "one huge value": lambda x: x.index_fill(0, torch.tensor(5), 1e30),
    "subnormals": lambda x: x * 1e-39,
    "next to zero": lambda x: x * 1e-7,  # below the least scale of FP8
    "negative": lambda x: -x.abs(),
    "ones": torch.ones_like,
}


def odd_inputs(features: int) -> torch.Tensor:
    """Rows that rounding may treat apart, in the order of `ODD`."""
    return torch.stack([make(torch.randn(features)).bfloat16() for make in ODD.values()])


def learner_differs(
    kernel, tensors: dict[str, torch.Tensor], bias: torch.Tensor, name: str
) -> Iterator[str]:
    """Rows for which `learner.forward=as_sampler` differs from the engine's layer: with the
    engine's own kernel, if it is available, and with torch's products.
    """
    yield from _differs(kernel, tensors, bias, name)
    if tensors["weight"].dtype == torch.int8 and vllm_operators.has_int8():
        with mock.patch.object(vllm_operators, "has_int8", return_value=False):
            yield from _differs(kernel, tensors, bias, f"{name}, multiplied by torch")


def _differs(
    kernel, tensors: dict[str, torch.Tensor], bias: torch.Tensor, name: str
) -> Iterator[str]:
    integer = tensors["weight"].dtype == torch.int8
    weight = (Int8Weight if integer else Fp8Weight)(tensors["weight"], tensors["weight_scale"])
    layer = Layer(kernel, tensors)
    features = tensors["weight"].shape[1]
    random = torch.randn(40, features) * torch.logspace(-2, 2, 40).unsqueeze(1)
    for x, rows in (
        (odd_inputs(features), list(ODD)),
        (random, [f"random row {row}" for row in range(40)]),
    ):
        codes, scale = weight.codes(x)
        theirs, their_scale, *_ = (
            ops.onednn_scaled_int8_quant(x, None, None, True) if integer else kernel.quant_fp8(x)
        )
        apart = (codes.view(torch.uint8) != theirs.view(torch.uint8)).any(1) & (
            their_scale > NORMAL
        ).flatten()
        yield from (
            f"{name}: the codes of {row}" for row, bad in zip(rows, apart, strict=True) if bad
        )
        for b in (None, bias):
            found = weight.product(codes, scale, b, x.dtype)
            wanted = layer(x, b)
            # or summed in another order
            exact = integer or isinstance(kernel.dnnl_handler, Fp8Weight)
            apart = ~(same(found, wanted) if exact else next_to(found, wanted))
            yield from (
                f"{name}: the outputs of {row}" for row, bad in zip(rows, apart, strict=True) if bad
            )


def alone(layer: Layer) -> float:
    """The share of outputs that change where each token is computed by itself, as engines do
    when they sample.
    """
    x = torch.randn(40, 2500)
    one_by_one = torch.cat([layer(row) for row in x.split(1)])
    return float((one_by_one != layer(x)).float().mean())


def same(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row by row to the last bit, but for tokens below the normal numbers: processors differ in the
    codes that overflow there.
    """
    return ((a == b) | ((a.float() - b.float()).abs() < NORMAL)).all(1)


def next_to(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Row by row, whether a few differ, by a rounding of BF16."""
    apart = a != b
    rounding = (a.float() - b.float()).abs() <= b.float().abs() * 2**-7
    return (rounding | ~apart).all(1) & (apart.float().mean(1) < 0.01)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


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
    int8_config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=False, is_channelwise=True, input_symmetric=True
    )
    attention = torch.bfloat16, 128, 64  # dtype, tokens of a cache block, size of a head
    vllms_attention = cpu_kernels._vllms_choice(*attention)
    cpu_kernels.install()
    cpu_kernels.install()
    chosen = choose_scaled_mm_linear_kernel(config, FP8_KERNELS, quantization="fp8_w8a8")
    chosen_int8 = choose_scaled_mm_linear_kernel(
        int8_config, INT8_KERNELS, quantization="int8_w8a8"
    )
    kernels = {
        Format.int8: lambda: chosen_int8(int8_config, NAMES),
        Format.fp8: lambda: chosen(config, FP8_NAMES),
    }
    fast = Layer(kernels[Format.fp8](), fp8)
    slow = Layer(ChannelWiseTorchFP8ScaledMMLinearKernel(config, FP8_NAMES), fp8)
    ours = Layer(kernels[Format.int8](), int8)
    given = [(x, b) for x in inputs for b in (None, bias)]
    differs = []
    changed = {}
    for format, make in kernels.items():
        long_OI = torch.randn(320, 2500)
        layers = {
            "a layer of 192 features": quantize(weight_OI, format),
            "a layer of 2500 features": quantize(long_OI, format),
            "a row-parallel half": quantize(long_OI[:, 1250:], format, row_amax(long_OI)),
        }
        for name, tensors in layers.items():
            differs += learner_differs(make(), tensors, bias, f"{format}, {name}")
        changed[format] = alone(Layer(make(), layers["a layer of 2500 features"]))
    print(
        json.dumps(
            {
                "fp8_kernel": chosen.__name__,
                "fp8_fast_to_slow": max(relative(fast(*one), slow(*one)) for one in given),
                "int8_kernel": chosen_int8.__name__,
                "int8_is_exact": all(torch.equal(ours(*one), exactly(int8, *one)) for one in given),
                "learner_differs": differs,
                "changed_alone": changed,
                "has_tiles": torch.cpu._is_amx_tile_supported(),
                "attention": [vllms_attention, cpu_attn._get_attn_isa(*attention)],
            }
        )
    )


if __name__ == "__main__":
    with set_current_vllm_config(
        VllmConfig(compilation_config=CompilationConfig(mode=CompilationMode.NONE))
    ):
        main()
