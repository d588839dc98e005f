"""Triton kernels of the learner: statistics and gradient of logits, channel maxima of norms.

Each reads its matrix once, in its own precision, and computes in FP32 what `logprobs.py` and
`observers.py` compute in torch. Row offsets have 64 bits: a pack can have more than 2^31 logits.

N tokens, V columns of logits, K or I token ids per token, S statistics, M positions, H hidden
channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from megatron_rl.learner.modules.logprobs import Gradients, VocabShare

COLUMNS = 1024  # of logits at a time: 16 bytes of BF16 for each of 128 threads
POSITIONS = 16  # of one program that measures a norm
CHANNELS = 512  # of a norm, for each warp


@triton.jit
def _scaled(pointers, inside, temperature, SCALED: tl.constexpr):
    x = tl.load(pointers, mask=inside, other=-float("inf")).to(tl.float32)
    if SCALED:
        x = tl.math.div_rn(x, temperature)
    return x


@triton.jit(do_not_specialize=["rows", "start", "ids_of_row"])
def statistics_kernel(
    stats,
    logits,
    ids,
    stride,
    rows,
    start,
    real,
    ids_of_row,
    temperature,
    IDS: tl.constexpr,
    MEAN: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row's log-sum-exp, logits of its ids (0 if on another rank) and expected logit."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lanes = tl.arange(0, BLOCK)
    top = -float("inf")
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, real, BLOCK):
        inside = first + lanes < real
        x = _scaled(logits + first + lanes, inside, temperature, SCALED)
        higher = tl.maximum(top, tl.max(x, 0))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp(x - base)
        shrink = tl.exp(top - base)
        total = total * shrink + weights
        if MEAN:
            weighted = weighted * shrink + weights * tl.where(inside, x, 0.0)
        top = higher
    sum_of_weights = tl.sum(total, 0)
    tl.store(stats + row, tl.log(sum_of_weights) + top)

    place = tl.arange(0, IDS).to(tl.int64)
    wanted = place < ids_of_row
    column = tl.load(ids + row * ids_of_row + place, mask=wanted, other=-1) - start
    held = (column >= 0) & (column < real)
    found = _scaled(logits + column, held, temperature, SCALED)
    tl.store(
        stats + (1 + place) * rows + row,
        tl.where(held, found, 0.0),
        mask=wanted,
    )
    if MEAN:
        divisor = tl.where(sum_of_weights == 0.0, 1.0, sum_of_weights)
        tl.store(stats + (1 + ids_of_row).to(tl.int64) * rows + row, tl.sum(weighted, 0) / divisor)


@triton.jit
def _gradient(
    x,
    of_norm,
    log_norm,
    of_entropy,
    mean,
    of_ids,
    temperature,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
):
    factor = of_norm
    if ENTROPY:
        # dH/dx = -p (x - E[x])
        factor -= of_entropy * (x - mean)
    value = tl.exp(x - log_norm) * factor
    value += of_ids
    if SCALED:
        value = tl.math.div_rn(value, temperature)
    return value


@triton.jit(do_not_specialize=["start", "ids_of_row"])
def gradient_kernel(
    grad,
    logits,
    ids,
    of_logprobs,
    of_entropy,
    log_norms,
    means,
    grad_stride,
    stride,
    start,
    real,
    columns,
    ids_of_row,
    temperature,
    TOP: tl.constexpr,
    ENTROPY: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write a row of the gradient, possibly over the logits; zero in columns that are no tokens.

    The first of the row's ids is the label. The others, distinct, have `TOP` lanes; their columns
    are written last.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    grad += row * grad_stride
    ids += row * ids_of_row
    of_logprobs += row * ids_of_row
    label = tl.load(ids) - start
    of_label = tl.load(of_logprobs)
    of_norm = -of_label
    log_norm = tl.load(log_norms + row)
    of_one_entropy = 0.0
    mean = 0.0
    if ENTROPY:
        of_one_entropy = tl.load(of_entropy + row)
        mean = tl.load(means + row)
    if TOP:
        place = 1 + tl.arange(0, TOP)
        wanted = place < ids_of_row
        top = tl.load(ids + place, mask=wanted, other=-1) - start
        of_top = tl.load(of_logprobs + place, mask=wanted, other=0.0)
        of_norm -= tl.sum(of_top, 0)
        held = (top >= 0) & (top < real)
        top_x = _scaled(logits + top, held, temperature, SCALED)
        tl.debug_barrier()  # all have read before one writes
    lanes = tl.arange(0, BLOCK)
    for first in range(0, columns, BLOCK):
        column = first + lanes
        inside = column < real
        x = _scaled(logits + column, inside, temperature, SCALED)
        of_ids = tl.where(column == label, of_label, 0.0)
        value = _gradient(
            x, of_norm, log_norm, of_one_entropy, mean, of_ids, temperature, ENTROPY, SCALED
        )
        value = tl.where(inside, value, 0.0)
        tl.store(grad + column, value.to(grad.dtype.element_ty), mask=column < columns)
    if TOP:
        tl.debug_barrier()  # the row is written
        of_top += tl.where(top == label, of_label, 0.0)
        value = _gradient(
            top_x, of_norm, log_norm, of_one_entropy, mean, of_top, temperature, ENTROPY, SCALED
        )
        tl.store(grad + top, value.to(grad.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["rows"])
def norm_amax_kernel(
    amax,
    x,
    weight,
    rows,
    stride,
    width,
    eps,
    NORM: tl.constexpr,
    POSITIONS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Raise `amax` to each channel's largest magnitude over some positions or their RMS norm."""
    lanes = tl.arange(0, WIDTH)
    inside = lanes < width
    most = tl.zeros([WIDTH], tl.float32)
    first = tl.program_id(0).to(tl.int64) * POSITIONS
    x += first * stride
    for row in range(0, tl.minimum(rows - first, POSITIONS)):
        value = tl.load(
            x + row * stride + lanes,
            mask=inside,
            other=0.0,
        ).to(tl.float32)
        if NORM:
            value *= tl.math.rsqrt(tl.sum(value * value, 0) / width + eps)
        most = tl.maximum(most, tl.abs(value), propagate_nan=tl.PropagateNan.ALL)
    if NORM:
        most *= tl.abs(tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32))
    # numbers from 0 on have the order of their bits, and NaN is above all of them
    bits = amax.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.atomic_max(bits + lanes, most.to(tl.int32, bitcast=True), mask=inside)


def statistics(
    logits_NV: Tensor, ids_NK: Tensor, share: VocabShare, temperature: float, mean: bool
) -> Tensor:
    """Log-sum-exp over the share, logits of the ids (0: elsewhere), and expected logit where
    wanted: [S, N].
    """
    rows, ids = ids_NK.shape
    stats_SN = torch.empty(1 + ids + mean, rows, dtype=torch.float32, device=logits_NV.device)
    if not rows:
        return stats_SN
    statistics_kernel[(rows,)](
        stats_SN,
        logits_NV,
        ids_NK.contiguous(),
        logits_NV.stride(0),
        rows,
        share.start,
        share.real,
        ids,
        float(temperature),
        IDS=triton.next_power_of_2(ids),
        MEAN=mean,
        SCALED=temperature != 1,
        BLOCK=COLUMNS,
    )
    return stats_SN


def write_gradient(
    grad_NV: Tensor,
    logits_NV: Tensor,
    grads: Gradients,
    share: VocabShare,
    temperature: float,
) -> None:
    """Write the gradient of all columns, which may take the place of the logits."""
    rows, columns = grad_NV.shape
    if not rows:
        return
    top = grads.ids_NI.shape[1] - 1
    # unread without a gradient of the entropy
    mean_N = grads.log_norm_N if grads.mean_N is None else grads.mean_N
    gradient_kernel[(rows,)](
        grad_NV,
        logits_NV,
        grads.ids_NI,
        grads.logprobs_NI,
        mean_N if grads.entropy_N is None else grads.entropy_N,
        grads.log_norm_N,
        mean_N,
        grad_NV.stride(0),
        logits_NV.stride(0),
        share.start,
        share.real,
        columns,
        1 + top,
        float(temperature),
        TOP=triton.next_power_of_2(top) if top else 0,
        ENTROPY=grads.entropy_N is not None,
        SCALED=temperature != 1,
        BLOCK=COLUMNS,
    )


def raise_amax(
    amax_H: Tensor, x_MH: Tensor, weight_H: Tensor | None = None, eps: float = 0.0
) -> None:
    """Raise the maxima by these positions, or by their RMS norm, scaled by `weight_H`."""
    rows, width = x_MH.shape
    if not rows:
        return
    padded = triton.next_power_of_2(width)
    norm_amax_kernel[(triton.cdiv(rows, POSITIONS),)](
        amax_H,
        x_MH,
        x_MH if weight_H is None else weight_H,
        rows,
        x_MH.stride(0),
        width,
        float(eps),
        NORM=weight_H is not None,
        POSITIONS=POSITIONS,
        WIDTH=padded,
        num_warps=min(max(padded // CHANNELS, 4), 16),
    )
