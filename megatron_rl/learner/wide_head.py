"""Logits in FP32 from BF16 weights: `model.head_precision=fp32`.

The output layer's products are summed in FP32 in any case; rounded to BF16, logits near 20 lie 0.125 apart. Here the
sums stay as they are, in the engine too (sampler/engine_settings.py). The weight stays in BF16, and gradients go back
through BF16 products as they do without.

N response tokens, H hidden width, V columns of this rank's share of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor


def widen(layer: ColumnParallelLinear) -> None:
    """The output layer of a BF16 learner: split over the vocabulary, its inputs whole on every rank."""
    layer._forward_impl = _product


def _product(input: Tensor, weight: Tensor, *, allreduce_dgrad: bool, tp_group: Any, **_: Any) -> Tensor:
    return _Wide.apply(input, weight, tp_group if allreduce_dgrad else None)


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_VH: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(input, weight_VH)
        ctx.group = group
        rows_NH = input.flatten(0, -2)
        if input.is_cuda:  # no FP32 copy of the weight
            logits_NV = torch.mm(rows_NH, weight_VH.t(), out_dtype=torch.float32)
        else:
            logits_NV = rows_NH.float().matmul(weight_VH.float().t())
        return logits_NV.view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight_VH = ctx.saved_tensors
        narrow = grad.to(weight_VH.dtype)
        grad_input = narrow.matmul(weight_VH)
        if ctx.group is not None:
            dist.all_reduce(grad_input, group=ctx.group)
        return grad_input, narrow.flatten(0, -2).t().matmul(input.flatten(0, -2)), None
