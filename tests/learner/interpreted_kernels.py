"""The learner's Triton kernels against torch: by Triton's interpreter on a CPU, or on a GPU.

`test_kernels.py` and `tests/gpu` run this file in a process of its own: Triton decides at its
import whether it interprets. The interpreter truncates BF16 results where a GPU rounds them.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl.learner.modules import kernels, logprobs, observers, triton_kernels
from megatron_rl.learner.modules.logprobs import (
    Gradients,
    VocabShare,
    highest,
    local_stats,
    write_gradient,
)

ON_GPU = torch.version.cuda is not None
EXACT = 1e-5 if ON_GPU else 1e-6  # of exponentials: a GPU's are approximate
DTYPES = (torch.float32, torch.bfloat16)
# rows, columns of a share, number of the share, shares, tokens of the vocabulary
SHAPES = {
    "ragged last tile": (7, 2500, 0, 1, 2500),
    "whole tiles": (3, 2048, 0, 1, 2048),
    "padding columns": (5, 1152, 0, 1, 1000),
    "first share": (9, 700, 0, 3, 1900),
    "last share": (9, 700, 2, 3, 1900),
    "share of padding alone": (4, 700, 2, 3, 1400),
    "no response token": (0, 700, 0, 1, 700),
}
FAR = (1 << 30) + 64  # numbers from one row to the next: the third begins beyond what 32 bits count


@pytest.fixture(autouse=True)
def device() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.device("cuda" if ON_GPU else "cpu"):
        yield


def example(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, VocabShare]:
    rows, columns, number, shares, vocab = SHAPES[shape]
    share = VocabShare.of(number, shares, vocab, columns, None)
    return (4 * torch.randn(rows, columns)).to(dtype), torch.randint(vocab, (rows,)), share


def with_top(labels_N: Tensor, share: VocabShare, count: int) -> Tensor:
    """Labels, and distinct top tokens in and outside the share, often the label too; -1: none."""
    other_NM = labels_N[:, None] + torch.arange(count) * 7
    top_NM = other_NM % (share.start + max(share.real, count) + 50)
    absent_NM = torch.rand(top_NM.shape) < 0.3
    return torch.cat((labels_N[:, None], top_NM.masked_fill(absent_NM, -1)), 1)


def in_torch() -> Any:
    return mock.patch.object(logprobs, "kernels_for", return_value=None)


def test_they_are_used() -> None:
    assert kernels.kernels_for(torch.ones(2, 2)) is triton_kernels
    assert ("Interpreted" in type(triton_kernels.statistics_kernel).__name__) != ON_GPU


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_and_gradient(shape: str, dtype: torch.dtype, temperature: float) -> None:
    """The gradient in FP32 and in BF16, in a place of its own and in that of the logits."""
    logits_NV, labels_N, share = example(shape, dtype)
    some_NI = with_top(labels_N, share, 5)
    for compute, ids, last in (
        (local_stats, labels_N[:, None], True),
        (local_stats, some_NI, False),
        (highest, labels_N, 5),
    ):
        found_SN = compute(logits_NV, ids, share, temperature, last)
        with in_torch():
            wanted_SN = compute(logits_NV, ids, share, temperature, last)
        torch.testing.assert_close(found_SN, wanted_SN, rtol=1e-6, atol=1e-6)

    stats_SN = local_stats(logits_NV, labels_N[:, None], share, temperature)
    log_norm_N, _, mean_N = stats_SN.clamp(min=0.0)
    of_entropy_N = torch.randn(len(labels_N))
    of_ids_NI = torch.randn(some_NI.shape)
    for ids, *asked in (
        (1, of_ids_NI[:, :1], None),
        (1, of_ids_NI[:, :1], of_entropy_N),
        (1, None, of_entropy_N),
        (6, of_ids_NI, None),
        (6, of_ids_NI, of_entropy_N),
    ):
        grads = Gradients.of(*asked, some_NI[:, :ids], log_norm_N, mean_N)
        given = (grads, share, temperature)
        for to, exact in ((torch.float32, EXACT), (torch.bfloat16, 2**-7)):
            found_NV, wanted_NV = (
                torch.full_like(logits_NV, torch.nan, dtype=to) for _ in range(2)
            )
            write_gradient(found_NV, logits_NV, *given)
            with in_torch():
                write_gradient(wanted_NV, logits_NV, *given)
            size = float(wanted_NV.abs().max()) if len(labels_N) else 0.0
            torch.testing.assert_close(found_NV, wanted_NV, rtol=exact, atol=EXACT * size)
            assert not found_NV[:, share.real :].any()
            in_place_NV = logits_NV.clone()
            write_gradient(in_place_NV, in_place_NV, *given)
            assert to != dtype or torch.equal(in_place_NV, found_NV)


def test_logits_of_ids() -> None:
    """Logits of several ids per token, some of them in other shares or absent (-1)."""
    logits_NV, labels_N, share = example("first share", torch.bfloat16)
    ids_NK = torch.stack(
        (
            labels_N,
            labels_N.flip(0),
            torch.full_like(labels_N, -1),
            labels_N,
            labels_N + 1,
        ),
        1,
    )
    found_SN = triton_kernels.statistics(logits_NV, ids_NK, share, 0.7, True)
    places_NK, held_NK = share.places(ids_NK)
    assert torch.equal(
        found_SN[1:-1].t(), (logits_NV.gather(1, places_NK).float() / 0.7).where(held_NK, 0.0)
    )
    assert torch.equal(found_SN[[0, 1, -1]], local_stats(logits_NV, labels_N[:, None], share, 0.7))


def test_logits_that_are_no_numbers() -> None:
    """A tile of -inf has probability zero; one NaN makes its own row NaN, and no other."""
    logits_NV, labels_N, share = example("ragged last tile", torch.float32)
    logits_NV[0, :1100] = -torch.inf
    logits_NV[1, 1500] = torch.nan
    ids_N1 = labels_N[:, None]
    found_SN = local_stats(logits_NV, ids_N1, share, 1.0, entropy=False)
    torch.testing.assert_close(
        found_SN[0, 0],
        logits_NV[0].logsumexp(0),
        rtol=1e-6,
        atol=1e-6,
    )
    grads = Gradients.of(None, None, ids_N1, found_SN[0], None)
    write_gradient(logits_NV, logits_NV, grads, share, 1.0)
    for values_NS in (found_SN[:1].t(), logits_NV):
        assert values_NS.isnan().any(1).tolist() == [False, True, *[False] * 5]


def test_rows_of_more_logits_than_32_bits_count() -> None:
    far_NV = torch.empty(2 * FAR + 40, dtype=torch.bfloat16).as_strided((3, 40), (FAR, 1))
    near_NV = far_NV.copy_(torch.randn(3, 40)).contiguous()
    ids_N1 = torch.tensor([[3], [7], [39]])
    share = VocabShare.of(0, 1, 40, 40, None)
    stats = []
    for matrix_NV in (far_NV, near_NV):
        stats.append(local_stats(matrix_NV, ids_N1, share, 1.0))
        grads = Gradients.of(
            ids_N1.float(),
            None,
            ids_N1,
            *stats[0][::2],
        )
        write_gradient(matrix_NV, matrix_NV, grads, share, 1.0)
    assert torch.equal(*stats) and torch.equal(far_NV, near_NV)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (16, 1000), (37, 1024)])
def test_largest_magnitudes(rows: int, width: int, dtype: torch.dtype) -> None:
    x_MH = torch.randn(rows, width).to(dtype)
    weight_H = torch.randn(width).to(dtype)
    before_H = torch.rand(width)
    linear = mock.Mock(eps=1e-6, layer_norm_weight=weight_H)
    for norm, wanted_MH in (((weight_H, 1e-6), observers.fused_norm(linear, x_MH)), ((), x_MH)):
        amax_H = before_H.clone()
        triton_kernels.raise_amax(amax_H, x_MH, *norm)
        wanted_H = torch.maximum(before_H, wanted_MH.abs().amax(0).float())
        torch.testing.assert_close(amax_H, wanted_H, rtol=1e-6, atol=0.0)
    x_MH[-1, 5] = torch.nan
    triton_kernels.raise_amax(amax_H, x_MH)
    triton_kernels.raise_amax(amax_H, x_MH[:0])
    assert amax_H.isnan().nonzero().tolist() == [[5]]
