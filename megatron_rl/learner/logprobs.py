"""Logprobs and entropy of a policy whose logits are split over the vocabulary.

The logits stay in their own precision; FP32 copies are of a chunk of rows. One collective per call.

S statistics of a token, N tokens, V columns of this rank's share of the vocabulary, R ranks that share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.learner.logit_chunks import chunk_rows


@dataclass(frozen=True)
class VocabShare:
    """Which columns of the vocabulary this rank's logits are."""

    start: int  # number of the first column
    real: int  # columns that are tokens; those behind only pad the share and hold no probability
    group: ProcessGroup | None  # the ranks that hold the other columns; None: there are none

    @classmethod
    def of(cls, rank: int, size: int, vocab: int, columns: int, group: ProcessGroup | None) -> VocabShare:
        start = rank * columns
        return cls(start, min(max(vocab - start, 0), columns), group if size > 1 else None)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float, entropy: bool
    ) -> Any:
        local_N = labels_N - share.start
        held_N = (local_N >= 0) & (local_N < share.real)
        local_N = torch.where(held_N, local_N, 0)
        stats_SN = torch.empty(3 if entropy else 2, len(labels_N), dtype=torch.float32, device=logits_NV.device)
        for rows, scaled in chunks(logits_NV, share, temperature):
            stats_SN[:, rows] = _local_stats(scaled, local_N[rows], held_N[rows], entropy)
        log_norm_N, label_N, mean_N = combined(stats_SN, share.group)
        ctx.save_for_backward(logits_NV, local_N, held_N, log_norm_N, mean_N)
        ctx.share, ctx.temperature = share, temperature
        ctx.set_materialize_grads(False)
        return label_N - log_norm_N, None if mean_N is None else log_norm_N - mean_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        logits_NV, local_N, held_N, log_norm_N, mean_N = ctx.saved_tensors
        grad_NV = torch.zeros_like(logits_NV)
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(log_norm_N)
        for rows, scaled in chunks(logits_NV, ctx.share, ctx.temperature):
            prob = (scaled - log_norm_N[rows, None]).exp_()
            factor = -grad_logprobs_N[rows, None]
            if grad_entropy_N is not None:
                # dH/dx = -p (x - E[x])
                factor = (scaled - mean_N[rows, None]).mul_(-grad_entropy_N[rows, None]).add_(factor)
            grad = prob.mul_(factor)
            if ctx.share.real:
                at_label = torch.where(held_N[rows], grad_logprobs_N[rows], 0.0)
                grad.scatter_add_(1, local_N[rows, None], at_label[:, None])
            if ctx.temperature != 1:
                grad.div_(ctx.temperature)
            grad_NV[rows, : ctx.share.real] = grad.to(grad_NV.dtype)
        return grad_NV, None, None, None, None


def chunks(logits_NV: Tensor, share: VocabShare, temperature: float) -> Iterator[tuple[slice, Tensor]]:
    """FP32 logits over temperature, some rows at a time, real columns only. Not to be written to."""
    step = chunk_rows(logits_NV.shape[1], host=logits_NV.device.type == "cpu")
    for start in range(0, len(logits_NV), step):
        rows = slice(start, start + step)
        chunk = logits_NV[rows, : share.real].float()
        if temperature != 1:
            chunk = chunk / temperature if logits_NV.dtype == torch.float32 else chunk.div_(temperature)
        yield rows, chunk


def _local_stats(scaled: Tensor, local_N: Tensor, held_N: Tensor, entropy: bool = True) -> Tensor:
    """Log of the sum of exponentials, logit of the label (0 where it is another rank's); for entropy the expected
    logit.
    """
    if scaled.shape[1] == 0:
        blank = scaled.new_zeros(len(scaled))
        return torch.stack((blank - torch.inf, blank, *((blank,) if entropy else ())))
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    total = weights.sum(-1)
    label = torch.where(held_N, scaled.gather(1, local_N[:, None]).squeeze(1), 0.0)
    means = (weights.mul_(scaled).sum(-1) / total,) if entropy else ()
    return torch.stack((total.log() + top.squeeze(1), label, *means))


def combined(stats_SN: Tensor, group: ProcessGroup | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the ranks' shares come to together; the expected logit where they know it."""
    all_RSN = gathered(stats_SN, group)
    asked = len(stats_SN) > 2
    if len(all_RSN) == 1:
        return stats_SN[0], stats_SN[1], stats_SN[2] if asked else None
    log_norm_N = all_RSN[:, 0].logsumexp(0)
    parts_RN = (all_RSN[:, 0] - log_norm_N).exp()
    return log_norm_N, all_RSN[:, 1].sum(0), (parts_RN * all_RSN[:, 2]).sum(0) if asked else None


def gathered(stats_SN: Tensor, group: ProcessGroup | None) -> Tensor:
    """Of every rank that has a share of the vocabulary: [R, S, N]."""
    if group is None or not stats_SN.shape[1]:  # a pack may hold no response token, on any rank of the group alike
        return stats_SN[None]
    all_RSN = stats_SN.new_empty(group.size(), *stats_SN.shape)
    torch.distributed.all_gather_into_tensor(all_RSN.view(-1, stats_SN.shape[1]), stats_SN, group=group)
    return all_RSN


def logprobs_and_entropy(
    logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """FP32 logprob of each label and entropy of its distribution, both with a gradient, at `temperature`."""
    return _Logprobs.apply(logits_NV, labels_N, share, _above_0(temperature), True)


def logprobs_alone(logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float = 1.0) -> Tensor:
    """The same logprobs, for passes that want no entropy: it is one more pass over the FP32 logits."""
    return _Logprobs.apply(logits_NV, labels_N, share, _above_0(temperature), False)[0]


def _above_0(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"rollout.temperature={temperature}: a policy gradient needs a temperature above 0")
    return temperature
