"""The learner's Triton kernels, run by Triton's interpreter on a CPU, against the same in torch.

`test_kernels.py` runs this file in a process of its own: Triton decides at its import whether it interprets.
The interpreter cuts BF16 results off where a GPU rounds them (see the instructions in `test_kernels.py`).
"""

from unittest import mock

import pytest
import torch
from torch import Tensor

from megatron_rl.learner.modules import kernels, logprobs, observers, triton_kernels
from megatron_rl.learner.modules.logprobs import Gradients, VocabShare, local_stats, write_gradient

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


def example(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, VocabShare]:
    rows, columns, number, shares, vocab = SHAPES[shape]
    random = torch.Generator().manual_seed(rows)
    logits_NV = (4 * torch.randn(rows, columns, generator=random)).to(dtype)
    labels_N = torch.randint(vocab, (rows,), generator=random)
    return logits_NV, labels_N, VocabShare.of(number, shares, vocab, columns, None)


def in_torch() -> mock._patch:
    return mock.patch.object(logprobs, "kernels_for", return_value=None)


def test_the_interpreter_runs_them() -> None:
    assert kernels.kernels_for(torch.ones(2, 2)) is triton_kernels
    assert "Interpreted" in type(triton_kernels.statistics_kernel).__name__


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_and_gradient(shape: str, dtype: torch.dtype, temperature: float) -> None:
    logits_NV, labels_N, share = example(shape, dtype)
    for entropy in (True, False):
        found_SN = local_stats(logits_NV, labels_N, share, temperature, entropy)
        with in_torch():
            wanted_SN = local_stats(logits_NV, labels_N, share, temperature, entropy)
        torch.testing.assert_close(found_SN, wanted_SN, rtol=1e-6, atol=1e-6)
        assert torch.equal(found_SN[1], wanted_SN[1])

        of_logprobs_N, of_entropy_N = torch.randn(2, len(labels_N), generator=torch.Generator().manual_seed(1))
        mean_N = wanted_SN[2] if entropy else None
        for asked in ((of_logprobs_N, None), (of_logprobs_N, of_entropy_N), (None, of_entropy_N)):
            if asked[1] is not None and not entropy:
                continue
            grads = Gradients.of(*asked, wanted_SN[0].clamp(min=0.0), mean_N)
            check_gradient(logits_NV, labels_N, grads, share, temperature)


def check_gradient(
    logits_NV: Tensor, labels_N: Tensor, grads: Gradients, share: VocabShare, temperature: float
) -> None:
    """In FP32 and in BF16, in another place and, where it has the logits' precision, in theirs."""
    for dtype in DTYPES:
        found_NV, wanted_NV = torch.full_like(logits_NV, 7.0, dtype=dtype), torch.empty_like(logits_NV, dtype=dtype)
        write_gradient(found_NV, logits_NV, labels_N, grads, share, temperature)
        with in_torch():
            write_gradient(wanted_NV, logits_NV, labels_N, grads, share, temperature)
        size = float(wanted_NV.abs().max()) if len(labels_N) else 0.0
        rtol = 1e-6 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(found_NV, wanted_NV, rtol=rtol, atol=1e-6 * size)
        assert not found_NV[:, share.real :].any()
        if dtype == logits_NV.dtype:
            in_place_NV = logits_NV.clone()
            write_gradient(in_place_NV, in_place_NV, labels_N, grads, share, temperature)
            assert torch.equal(in_place_NV, found_NV)


def test_logits_of_ids() -> None:
    """Of several for each token, of which some are in other shares or none (-1)."""
    logits_NV, labels_N, share = example("first share", torch.bfloat16)
    ids_NK = torch.stack(
        (labels_N, labels_N.flip(0), torch.full_like(labels_N, -1), torch.arange(9) + 695, labels_N), 1
    )
    found_SN = triton_kernels.statistics(logits_NV, ids_NK, share, 0.7, True)
    places_NK, held_NK = share.places(ids_NK)
    wanted_NK = (logits_NV.gather(1, places_NK).float() / 0.7).where(held_NK, 0.0)
    assert torch.equal(found_SN[1:-1].t(), wanted_NK)
    alone_SN = triton_kernels.statistics(logits_NV, labels_N[:, None], share, 0.7, True)
    assert torch.equal(found_SN[[0, 1, -1]], alone_SN)


def test_logits_that_are_no_numbers() -> None:
    """A tile of -inf is no probability; one NaN makes all of its row NaN, and nothing of another's."""
    logits_NV, labels_N, share = example("ragged last tile", torch.float32)
    logits_NV[0, :1100] = -torch.inf
    logits_NV[1, 1500] = torch.nan
    labels_N[:2] = 2000
    found_SN = local_stats(logits_NV, labels_N, share, 1.0, entropy=False)
    torch.testing.assert_close(found_SN[0, 0], logits_NV[0].logsumexp(0), rtol=1e-6, atol=1e-6)
    assert found_SN[0].isnan().tolist() == [False, True, *[False] * 5]
    grads = Gradients.of(torch.ones(7), None, found_SN[0], None)
    write_gradient(logits_NV, logits_NV, labels_N, grads, share, 1.0)
    assert logits_NV.isnan().any(1).tolist() == [False, True, *[False] * 5]


def test_rows_of_more_logits_than_32_bits_count() -> None:
    logits_NV = torch.empty(2 * FAR + 40, dtype=torch.bfloat16).as_strided((3, 40), (FAR, 1))
    near_NV = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits_NV.copy_(near_NV)
    labels_N, share = torch.tensor([3, 7, 39]), VocabShare.of(0, 1, 40, 40, None)
    found_SN = local_stats(logits_NV, labels_N, share, 1.0)
    assert torch.equal(found_SN, local_stats(near_NV, labels_N, share, 1.0))
    grads = Gradients.of(torch.ones(3), None, found_SN[0], None)
    for matrix_NV in (logits_NV, near_NV):
        write_gradient(matrix_NV, matrix_NV, labels_N, grads, share, 1.0)
    assert torch.equal(logits_NV, near_NV)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (16, 1000), (37, 1024)])
def test_largest_magnitudes(rows: int, width: int, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(rows)
    x_MH = torch.randn(rows, width, generator=random).to(dtype)
    linear = mock.Mock(eps=1e-6, layer_norm_weight=torch.randn(width, generator=random).to(dtype))
    before_H = torch.rand(width, generator=random)
    for norm, wanted_MH in (((), x_MH), ((linear.layer_norm_weight, 1e-6), observers.fused_norm(linear, x_MH))):
        amax_H = before_H.clone()
        triton_kernels.raise_amax(amax_H, x_MH, *norm)
        wanted_H = torch.maximum(before_H, wanted_MH.abs().amax(0).float())
        torch.testing.assert_close(amax_H, wanted_H, rtol=1e-6, atol=0.0)
    x_MH[-1, 5] = torch.nan
    triton_kernels.raise_amax(amax_H, x_MH)
    assert amax_H.isnan().nonzero().tolist() == [[5]]
    triton_kernels.raise_amax(before_H, x_MH[:0])
    assert bool(before_H.isfinite().all())
