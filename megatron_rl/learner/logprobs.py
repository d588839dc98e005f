"""Logprobs and entropy of logits split over the vocabulary, among all tokens or among kept ones; and supports compared.

The logits stay in their own precision; FP32 copies are of a chunk of rows. One collective per call. With top_k and
top_p the policy is renormalised over the tokens that the sampler drew from: a gradient reaches those alone.

S statistics of a token, N tokens, V columns of this rank's share of the vocabulary, R ranks that share it, K kept
tokens of each token at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.learner.costs import chunk_rows


@dataclass(frozen=True)
class VocabShare:
    """The columns of the vocabulary that this rank's logits are."""

    start: int  # number of the first column
    real: int  # columns that are tokens; those behind only pad the share and hold no probability
    group: ProcessGroup | None  # the ranks that hold the other columns; None: there are none

    @classmethod
    def of(cls, rank: int, size: int, vocab: int, columns: int, group: ProcessGroup | None) -> VocabShare:
        start = rank * columns
        return cls(start, min(max(vocab - start, 0), columns), group if size > 1 else None)

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each token here, 0 where it is another rank's or none (-1); and whether it is here."""
        local = tokens - self.start
        held = (local >= 0) & (local < self.real)
        return torch.where(held, local, 0), held


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float, entropy: bool
    ) -> Any:
        local_N, held_N = share.places(labels_N)
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
    """Log of the sum of exponentials, the label's logit (0 where it is elsewhere); for entropy the expected logit."""
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
    """Log of the sum of exponentials, label's logit, and, where it is asked for, expected logit, over all ranks."""
    all_RSN = gathered(stats_SN, group)
    asked = len(stats_SN) > 2
    if len(all_RSN) == 1:
        return stats_SN[0], stats_SN[1], stats_SN[2] if asked else None
    log_norm_N = all_RSN[:, 0].logsumexp(0)
    parts_RN = (all_RSN[:, 0] - log_norm_N).exp()
    return log_norm_N, all_RSN[:, 1].sum(0), (parts_RN * all_RSN[:, 2]).sum(0) if asked else None


def gathered(stats_SN: Tensor, group: ProcessGroup | None) -> Tensor:
    """The statistics of every rank that has a share of the vocabulary: [R, S, N]."""
    if group is None or not stats_SN.shape[1]:  # a pack may hold no response token, on any rank of the group alike
        return stats_SN[None]
    all_RSN = stats_SN.new_empty(group.size(), *stats_SN.shape)
    torch.distributed.all_gather_into_tensor(all_RSN.view(-1, stats_SN.shape[1]), stats_SN, group=group)
    return all_RSN


class _KeptLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, kept_NK: Tensor, share: VocabShare, temperature: float
    ) -> Any:
        local_NK, held_NK = share.places(kept_NK)
        scaled_NK = (logits_NV.gather(1, local_NK).float() / temperature).masked_fill_(~held_NK, -torch.inf)
        at_label_NK = held_NK & (kept_NK == labels_N[:, None])
        label_N = scaled_NK.masked_fill(~at_label_NK, 0.0).sum(1)
        log_sum_N = scaled_NK.logsumexp(1)
        mean_N = _mean(scaled_NK, log_sum_N)
        log_norm_N, label_N, expected_N = combined(torch.stack((log_sum_N, label_N, mean_N)), share.group)
        assert expected_N is not None
        ctx.save_for_backward(scaled_NK, local_NK, at_label_NK, log_norm_N, expected_N)
        ctx.columns, ctx.dtype, ctx.temperature = logits_NV.shape[1], logits_NV.dtype, temperature
        ctx.set_materialize_grads(False)
        return label_N - log_norm_N, log_norm_N - expected_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        scaled_NK, local_NK, at_label_NK, log_norm_N, mean_N = ctx.saved_tensors
        prob_NK = (scaled_NK - log_norm_N[:, None]).exp()
        grad_NK = torch.zeros_like(prob_NK)
        if grad_logprobs_N is not None:
            grad_NK += grad_logprobs_N[:, None] * (at_label_NK.float() - prob_NK)
        if grad_entropy_N is not None:
            centred_NK = scaled_NK.masked_fill(prob_NK == 0, 0.0) - mean_N[:, None]
            grad_NK -= grad_entropy_N[:, None] * prob_NK * centred_NK
        grad_NV = torch.zeros(len(scaled_NK), ctx.columns, dtype=ctx.dtype, device=scaled_NK.device)
        # each kept token once; places that hold none add their zero to column 0
        return grad_NV.scatter_add_(1, local_NK, (grad_NK / ctx.temperature).to(ctx.dtype)), None, None, None, None


def _mean(scaled_NK: Tensor, log_sum_N: Tensor) -> Tensor:
    """The expected logit among this rank's tokens, 0 where it has none."""
    prob_NK = (scaled_NK - log_sum_N[:, None]).exp().nan_to_num(0.0)
    return (prob_NK * scaled_NK.masked_fill(scaled_NK.isinf(), 0.0)).sum(1)


def logprobs_and_entropy(
    logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float = 1.0, kept_NK: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """FP32 logprob of each label and entropy of its distribution, both with a gradient, at `temperature`.

    `kept_NK`: among these tokens alone (-1: none), of which the label is one.
    """
    if not temperature > 0:
        raise ValueError(f"rollout.temperature={temperature}: a policy gradient needs a temperature above 0")
    if kept_NK is not None:
        return _KeptLogprobs.apply(logits_NV, labels_N, kept_NK, share, temperature)
    return _Logprobs.apply(logits_NV, labels_N, share, temperature, True)


def logprobs_alone(
    logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float = 1.0, kept_NK: Tensor | None = None
) -> Tensor:
    """The logprobs of `logprobs_and_entropy` without the entropy, which costs one more pass over the FP32 logits."""
    if kept_NK is not None or not temperature > 0:
        return logprobs_and_entropy(logits_NV, labels_N, share, temperature, kept_NK)[0]
    return _Logprobs.apply(logits_NV, labels_N, share, temperature, False)[0]


@dataclass(frozen=True)
class Truncation:
    """How far the sampler's support is from the one that the policy itself would have kept."""

    outside_N: Tensor  # bool: the policy's own top_k and top_p would have cut the sampled token
    log_mass_N: Tensor  # log of the policy's probability of the tokens that were kept: what d would be off by


@torch.no_grad()
def truncation(
    logits_NV: Tensor, labels_N: Tensor, logprobs_N: Tensor, share: VocabShare, temperature: float, k: int, p: float
) -> Truncation:
    """Compare supports. `logprobs_N`: among the kept tokens. Ties with the last of the k are inside."""
    local_N, held_N = share.places(labels_N)
    found = logits_NV.new_zeros(k + 2, len(labels_N), dtype=torch.float32)
    found[:-1] = -torch.inf
    for rows, scaled in chunks(logits_NV, share, temperature):
        if share.real:
            found[: min(k, share.real), rows] = scaled.topk(min(k, share.real)).values.t()
            found[-2, rows] = scaled.logsumexp(1)
            found[-1, rows] = scaled.gather(1, local_N[rows, None]).squeeze(1).where(held_N[rows], 0.0)
    everyone = gathered(found, share.group)
    label_N, log_total_N = everyone[:, -1].sum(0), everyone[:, -2].logsumexp(0)
    top_NK = everyone[:, :-2].flatten(0, 1).t().topk(k).values
    above_N = (top_NK.softmax(1) * (top_NK > label_N[:, None])).sum(1)
    outside_N = (label_N < top_NK[:, -1]) | ((above_N >= p) & (p < 1))
    return Truncation(outside_N, label_N - logprobs_N - log_total_N)
