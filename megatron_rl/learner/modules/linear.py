"""Linear layers in place of megatron-core's: sampler arithmetic; FP32 outputs of head and experts.

`learner.forward=as_sampler` (docs/concepts/precision.md): weights are quantized as a sync quantizes
them, activations per token as the engine does. INT8 products are exact, the engine's own to the
last bit; FP8 products are summed in FP32, the same but for the order of the sums. Gradients are
those of the plain layer (straight-through). A tensor-parallel engine quantizes each of its slices
of a row-parallel input by itself, rounds the products, and adds; so does this in any layout.

`model.head_precision=fp32`: logits stay in FP32, in the engine too (sampler/engine_settings.py):
rounded to BF16 those near 20 lie 0.125 apart. The weight stays in BF16, and gradients go back
through BF16 products.

M tokens, K input features and N output features held here (an output layer's: vocabulary share).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_rl.distributed import TorchGroup
from megatron_rl.quantization.cpu_matmul import SampledWeight


@dataclass(frozen=True)
class Sampled:
    """Quantized weight of a layer on this rank."""

    # for each of the engine's slices of the inputs that this rank holds
    parts: tuple[SampledWeight, ...]
    # smoothing: the weight was multiplied by it, so inputs are divided
    calm_K: Tensor | None = None


class ColumnLinear(ColumnParallelLinear):
    """megatron-core's column-parallel layer, until it is given a quantized weight."""

    sampled: Sampled | None = None

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.sampled is None:
            return super()._forward_impl(input, weight, *args, **kwargs)
        return _Column.apply(input, weight, kwargs["bias"], self)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, layer: ColumnLinear
    ) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.use_bias = bias is not None
        ctx.layer = layer
        assert layer.sampled is not None
        if layer.sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=layer.tp_group)
        x_MK = input.flatten(0, -2)
        if layer.sampled.calm_K is not None:
            x_MK = x_MK / layer.sampled.calm_K.to(x_MK)
        (weight_NK,) = layer.sampled.parts
        codes_MK, scale_M1 = weight_NK.codes(x_MK)
        out_MN = weight_NK.product(codes_MK, scale_M1, bias, input.dtype)
        return out_MN.view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        input, weight = ctx.saved_tensors
        layer = ctx.layer
        grad_MN = grad.flatten(0, -2)
        grad_input = grad.matmul(weight)
        if layer.sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=layer.tp_group)
            grad_input = reduce_scatter_to_sequence_parallel_region(
                grad_input, group=layer.tp_group
            )
        elif layer.allreduce_dgrad:
            dist.all_reduce(grad_input, group=layer.tp_group)
        grad_weight = grad_MN.t().matmul(input.flatten(0, -2))
        grad_bias = grad_MN.sum(0) if ctx.use_bias else None
        return grad_input, grad_weight, grad_bias, None


class RowLinear(RowParallelLinear):
    """megatron-core's row-parallel layer, until it is given a quantized weight and a number of
    slices: the engine's.
    """

    sampled: Sampled | None = None
    slices = 1

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.sampled is None:
            return super().forward(input_)
        assert self.input_is_parallel
        assert self.bias is None
        return _Row.apply(input_, self.weight, self), None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: RowLinear) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        assert layer.sampled is not None
        x_MK = input.flatten(0, -2)
        group = layer.tp_group
        size = layer.tp_group.size()
        if size > layer.slices:  # every rank has the sum
            out_MN = _shared_slices(x_MK, layer.sampled.parts[0], layer.slices, group)
            out = out_MN.view(*input.shape[:-1], -1)
            if layer.sequence_parallel:
                out = out.chunk(size)[group.rank()].contiguous()
        else:
            out = _whole_slices(x_MK, layer.sampled).view(*input.shape[:-1], -1)
            # what ranks add is rounded once more, when it is added
            out = out.float() if size > 1 else out
            out = add_over_ranks(out, layer.sequence_parallel, group)
        return out.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight = ctx.saved_tensors
        if ctx.layer.sequence_parallel:
            grad = gather_from_sequence_parallel_region(grad, group=ctx.layer.tp_group)
        grad_MN = grad.flatten(0, -2)
        return grad.matmul(weight), grad_MN.t().matmul(input.flatten(0, -2)), None


def add_over_ranks(out: Tensor, sequence_parallel: bool, group: Any) -> Tensor:
    """Sum over the ranks of a row-parallel layer: of all positions, or of this rank's."""
    if sequence_parallel:
        return reduce_scatter_to_sequence_parallel_region(out, group=group)
    if group.size() > 1:
        dist.all_reduce(out, group=group)
    return out


def amax_of_slices(x_MK: Tensor, slices: int, mine: int, max_: Callable[[Tensor], Any]) -> Tensor:
    """Each token's largest magnitude in each engine slice, over the ranks: [S, M, 1].

    `mine`: the slice of which this rank holds a part; `max_`: in-place maximum over the ranks.
    """
    amax_SM1 = x_MK.new_zeros((slices, len(x_MK), 1), dtype=torch.float32)
    amax_SM1[mine] = x_MK.float().abs().amax(1, keepdim=True)
    max_(amax_SM1)
    return amax_SM1


def _whole_slices(x_MK: Tensor, sampled: Sampled) -> Tensor:
    """The rounded outputs of this rank's slices, added in FP32 if there are several."""
    first_MN, *others = (
        weight.product(*weight.codes(x), None, x_MK.dtype)
        for x, weight in zip(x_MK.chunk(len(sampled.parts), 1), sampled.parts, strict=True)
    )
    if others:
        return sum(others, first_MN.float())
    return first_MN


def _shared_slices(x_MK: Tensor, weight: SampledWeight, slices: int, group: Any) -> Tensor:
    """The outputs of all slices in FP32, where several ranks hold the inputs of one. Sums of INT32
    have no order.
    """
    mine = group.rank() * slices // group.size()
    amax_SM1 = amax_of_slices(x_MK, slices, mine, TorchGroup(group).max_)
    codes_MK, _ = weight.codes(x_MK, amax_SM1[mine])
    sums_MN = weight.addable_sums(codes_MK)
    sums_SMN = sums_MN.new_zeros((slices, *sums_MN.shape))
    sums_SMN[mine] = sums_MN
    dist.all_reduce(sums_SMN, group=group)
    total_MN = torch.zeros(sums_MN.shape, dtype=torch.float32, device=x_MK.device)
    for scale_M1, sums_MN in zip(weight.scale(amax_SM1), sums_SMN, strict=True):
        total_MN += weight.scaled(sums_MN.float(), scale_M1, None, x_MK.dtype)
    return total_MN


def widen(layer: ColumnParallelLinear | RowParallelLinear) -> None:
    """Let a BF16 output layer, or an expert's, give FP32. Every rank has its whole inputs; no ranks
    are added up.
    """
    layer._forward_impl = _product


def is_wide(layer: ColumnParallelLinear) -> bool:
    return layer._forward_impl is _product


def _product(
    input: Tensor, weight: Tensor, *, allreduce_dgrad: bool, tp_group: Any, **_: Any
) -> Tensor:
    return _Wide.apply(input, weight, tp_group if allreduce_dgrad else None)


def wide_product(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product of two BF16 matrices in FP32; on a GPU without an FP32 copy of either."""
    if x_MK.is_cuda:
        return torch.mm(x_MK, weight_NK.t(), out_dtype=torch.float32)
    return x_MK.float().matmul(weight_NK.float().t())


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_NK: Tensor, group: Any) -> Tensor:
        ctx.save_for_backward(input, weight_NK)
        ctx.group = group
        return wide_product(input.flatten(0, -2), weight_NK).view(*input.shape[:-1], len(weight_NK))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight_NK = ctx.saved_tensors
        narrow = grad.to(weight_NK.dtype)
        grad_input = narrow.matmul(weight_NK)
        if ctx.group is not None:
            dist.all_reduce(grad_input, group=ctx.group)
        return grad_input, narrow.flatten(0, -2).t().matmul(input.flatten(0, -2)), None
