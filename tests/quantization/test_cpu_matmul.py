"""BF16 products by way of FP32, rounded once; exact sums of INT8 and FP8 layers."""

import pytest
import torch

from megatron_rl.config.schema import Format
from megatron_rl.quantization import cpu_matmul, vllm_operators
from megatron_rl.quantization.cpu_matmul import (
    PRODUCTS,
    Fp8Weight,
    Int8Weight,
    _through_fp32,
    fp8_codes,
)
from megatron_rl.quantization.quantize import quantize

SHAPES = {
    "mm": [(5, 48), (48, 7)],
    "addmm": [(7,), (5, 48), (48, 7)],
    "bmm": [(3, 5, 48), (3, 48, 7)],
    "baddbmm": [(3, 5, 7), (3, 5, 48), (3, 48, 7)],
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_rounded_once(name):
    scales = {"beta": 0.5, "alpha": 2.0} if "add" in name else {}
    torch.manual_seed(1)
    matrices = [torch.randn(shape).bfloat16() for shape in SHAPES[name]]
    plain = getattr(torch, name)
    made = _through_fp32(getattr(torch.ops.aten, name).out)(*matrices, **scales)
    exact = plain(*(matrix.double() for matrix in matrices), **scales)
    assert made.dtype == torch.bfloat16
    assert made.shape == exact.shape
    error = (made.double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 + 1e-5).all()


def test_other_types_and_transposed_and_empty_matrices():
    torch.manual_seed(1)
    multiply = _through_fp32(torch.ops.aten.mm.out)
    left = torch.randn(48, 5)
    right = torch.randn(7, 48)
    assert torch.equal(multiply(left.t(), right.t()), left.t() @ right.t())  # left as they are
    left = left.bfloat16().t()
    right = right.bfloat16().t()
    assert torch.equal(multiply(left, right), multiply(left.contiguous(), right.contiguous()))
    assert multiply(torch.zeros(0, 4).bfloat16(), torch.zeros(4, 2).bfloat16()).shape == (0, 2)
    nothing = multiply(torch.zeros(3, 0).bfloat16(), torch.zeros(0, 2).bfloat16())
    assert torch.equal(nothing, torch.zeros(3, 2).bfloat16())


@pytest.mark.parametrize("features", [1, 1024, 5000])
@pytest.mark.parametrize("codes", ["random", "largest", "opposite"])
def test_int8_sums_are_exact(features, codes):
    torch.manual_seed(1)
    left, right = (
        torch.randint(
            -127,
            128,
            (rows, features),
            dtype=torch.int8,
        )
        for rows in (6, 9)
    )
    if codes != "random":
        left.fill_(127)
        right.fill_(127 if codes == "largest" else -127)
    exact = (left.long() @ right.long().t()).float()
    assert torch.equal(Int8Weight(right, torch.ones(9, 1)).sums(left), exact)


@pytest.mark.skipif(
    not vllm_operators.has_int8(), reason="no INT8 instructions, or no vLLM for hosts"
)
@pytest.mark.parametrize("features", [1025, 4096])
@pytest.mark.parametrize("tokens", [0, 40])
@pytest.mark.parametrize("biased", [False, True])
def test_the_engine_s_kernel_and_torch_s_products_are_the_same_bytes(
    features, tokens, biased, monkeypatch
):
    monkeypatch.setattr(vllm_operators, "SUMS", 96 * 17)  # of 40 tokens 17, 17 and 6
    torch.manual_seed(1)
    made = quantize(torch.randn(96, 2 * features), Format.int8)
    weight = Int8Weight(made["weight"][:, features:], made["weight_scale"])
    x_MK = (torch.randn(tokens, features) * torch.logspace(-2, 2, tokens).unsqueeze(1)).bfloat16()
    x_MK[:1] = 0
    bias_N = torch.randn(96).bfloat16() if biased else None
    codes_MK, scale_M1 = weight.codes(x_MK)
    found_MN = weight.product(codes_MK, scale_M1, bias_N, torch.bfloat16)
    monkeypatch.setattr(vllm_operators, "has_int8", lambda: False)
    plain_MK, plain_M1 = weight.codes(x_MK)
    assert torch.equal(codes_MK[1:], plain_MK[1:])
    assert torch.equal(scale_M1, plain_M1)
    assert torch.equal(found_MN, weight.product(plain_MK, plain_M1, bias_N, torch.bfloat16))
    assert found_MN.shape == (tokens, 96)


def test_fp8_codes_clip_nothing_and_the_largest_of_a_token_is_the_largest_code():
    """So that gradients that pass them by are those of rounding alone."""
    torch.manual_seed(1)
    x_MK = torch.randn(4000, 48) * torch.logspace(-3, 30, 4000).unsqueeze(1)
    x_MK[0] = 0
    codes_MK, scale_M1 = fp8_codes(x_MK.bfloat16())
    assert (codes_MK[1:].float().abs().amax(1) == 448).all()
    assert not codes_MK[0].float().any()
    error = (codes_MK.double() * scale_M1 - x_MK.bfloat16().double()).abs()
    # half a step: of three bits after the leading one, or of the subnormal ones
    assert (
        error <= (x_MK.bfloat16().double().abs() * 2**-4).maximum(scale_M1 * 2**-10) * (1 + 1e-6)
    ).all()
    # next to nothing: the least scale
    codes_MK, scale_M1 = fp8_codes(torch.tensor([[1e-9, -1e-5]]))
    assert scale_M1.item() == pytest.approx(1 / (448 * 512))
    assert codes_MK.float().tolist() == [[0, -2.25]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bf16", [True, False])
def test_fp8_sums_are_rounded_once_and_add_up_over_parts(dtype, has_bf16, monkeypatch):
    monkeypatch.setattr(cpu_matmul, "has_bf16", lambda: has_bf16)
    torch.manual_seed(1)
    made = quantize(torch.randn(9, 200), Format.fp8)
    weight = Fp8Weight(made["weight"], made["weight_scale"])
    bias_N = torch.randn(9).to(dtype)
    codes_MK, scale_M1 = weight.codes(torch.randn(6, 200).to(dtype))
    exact_MN = codes_MK.double() @ made["weight"].double().t()
    found_MN = weight.product(codes_MK, scale_M1, bias_N, dtype)
    assert found_MN.dtype == dtype
    wanted_MN = (
        exact_MN.to(dtype).float() * scale_M1 * made["weight_scale"].flatten() + bias_N
    ).to(dtype)
    assert torch.allclose(found_MN, wanted_MN, rtol=1e-6, atol=1e-6)
    parts = [
        Fp8Weight(part, made["weight_scale"]).addable_sums(codes)
        for part, codes in zip(made["weight"].split(100, 1), codes_MK.split(100, 1), strict=True)
    ]
    assert torch.allclose(
        weight.scaled(sum(parts), scale_M1, bias_N, dtype), wanted_MN, rtol=1e-6, atol=1e-6
    )
