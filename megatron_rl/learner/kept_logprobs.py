"""Logprobs and entropy over the tokens that the sampler drew from, where the vocabulary is split over ranks.

With top_k and top_p the sampler draws from a few tokens, and reports logprobs that sum to 1 over those. The policy is
renormalised over the same ones: a gradient reaches them alone, and a full softmax is needed for metrics only.

N tokens, K kept tokens of each at most, V columns of this rank's share of the vocabulary, R ranks that share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.logprobs import VocabShare, chunks, combined, gathered


class _KeptLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, kept_NK: Tensor, share: VocabShare, temperature: float
    ) -> Any:
        local_NK = kept_NK - share.start
        held_NK = (kept_NK >= 0) & (local_NK >= 0) & (local_NK < share.real)
        local_NK = torch.where(held_NK, local_NK, 0)
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


def kept_logprobs_and_entropy(
    logits_NV: Tensor, labels_N: Tensor, kept_NK: Tensor, share: VocabShare, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """As `logprobs_and_entropy`, among the tokens of `kept_NK` (-1: none). The label is one of them."""
    return _KeptLogprobs.apply(logits_NV, labels_N, kept_NK, share, temperature)


@dataclass(frozen=True)
class Truncation:
    """How far the sampler's support is from the one that the policy itself would have kept."""

    outside_N: Tensor  # bool: the policy's own top_k and top_p would have cut the sampled token
    log_mass_N: Tensor  # log of the policy's probability of the tokens that were kept: what d would be off by


@torch.no_grad()
def truncation(
    logits_NV: Tensor, labels_N: Tensor, logprobs_N: Tensor, share: VocabShare, temperature: float, k: int, p: float
) -> Truncation:
    """`logprobs_N`: among the kept tokens. Ties with the last of the k are inside."""
    local_N = labels_N - share.start
    held_N = (local_N >= 0) & (local_N < share.real)
    local_N = torch.where(held_N, local_N, 0)
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
