"""BF16 products by way of FP32: rounded once, as a processor with BF16 instructions does."""

import pytest
import torch

from megatron_rl.quantization.host_products import PRODUCTS, Int8Weight, _through_fp32

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_left_as_they_are(dtype):
    torch.manual_seed(1)
    left, right = torch.randn(5, 48, dtype=dtype), torch.randn(48, 7, dtype=dtype)
    assert torch.equal(_through_fp32(torch.ops.aten.mm.out)(left, right), left @ right)


def test_transposed_and_empty_matrices():
    multiply = _through_fp32(torch.ops.aten.mm.out)
    left, right = torch.randn(48, 5).bfloat16().t(), torch.randn(7, 48).bfloat16().t()
    assert torch.equal(multiply(left, right), multiply(left.contiguous(), right.contiguous()))
    assert multiply(torch.zeros(0, 4).bfloat16(), torch.zeros(4, 2).bfloat16()).shape == (0, 2)
    nothing = multiply(torch.zeros(3, 0).bfloat16(), torch.zeros(0, 2).bfloat16())
    assert torch.equal(nothing, torch.zeros(3, 2).bfloat16())


@pytest.mark.parametrize("features", [1, 192, 1024, 1025, 5000])
@pytest.mark.parametrize("codes", ["random", "largest", "opposite"])
def test_int8_sums_are_exact(features, codes):
    torch.manual_seed(1)
    left, right = (torch.randint(-127, 128, (rows, features), dtype=torch.int8) for rows in (6, 9))
    if codes != "random":
        left.fill_(127)
        right.fill_(127 if codes == "largest" else -127)
    exact = (left.long() @ right.long().t()).float()
    assert torch.equal(Int8Weight(right, torch.ones(9, 1)).sums(left), exact)
