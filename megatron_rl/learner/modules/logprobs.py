"""Logprobs and entropy of vocabulary-parallel logits, over all tokens or the sampling support
(top_k, top_p); comparison of supports. Logprobs are of each token's label, and if requested of its
top tokens.

The logits stay in their own precision; FP32 copies are of a chunk of rows, or inside a kernel
(kernels.py). One collective per call. With top_k and top_p the policy is renormalised over the
tokens that the sampler drew from: a gradient reaches those alone.

S statistics of a token, N tokens, V columns of this rank's share of the vocabulary, R ranks that
share it, K kept tokens of each token at most, I ids of each token: the label, then its top tokens,
padded with -1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl.learner.modules.costs import chunk_rows
from megatron_rl.learner.modules.kernels import kernels_for


@dataclass(frozen=True)
class VocabShare:
    """The columns of the vocabulary that this rank's logits are."""

    start: int  # number of the first column
    real: int  # columns that are tokens; those behind only pad the share and hold no probability
    group: ProcessGroup | None  # the ranks that hold the other columns; None: there are none

    @classmethod
    def of(
        cls, rank: int, size: int, vocab: int, columns: int, group: ProcessGroup | None
    ) -> VocabShare:
        start = rank * columns
        return cls(start, min(max(vocab - start, 0), columns), group if size > 1 else None)

    def places(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The local column of each token, 0 if another rank's or none (-1); and if it is here."""
        local = tokens - self.start
        held = (local >= 0) & (local < self.real)
        return torch.where(held, local, 0), held

    def parts(self, columns: int) -> Iterator[tuple[slice, VocabShare]]:
        """The share in pieces of so many columns, each a share that no other rank has a part in;
        padding is in none.
        """
        for first in range(0, max(self.real, 1), columns):
            real = min(self.real - first, columns)
            yield slice(first, first + real), VocabShare(self.start + first, real, None)


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: Tensor,
        ids_NI: Tensor,
        share: VocabShare,
        temperature: float,
        entropy: bool,
    ) -> Any:
        stats_SN = local_stats(logits_NV, ids_NI, share, temperature, entropy)
        log_norm_N, logits_IN, mean_N = combined(stats_SN, share.group, ids_NI.shape[1])
        ctx.save_for_backward(logits_NV, ids_NI, log_norm_N, mean_N)
        ctx.share = share
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return (logits_IN - log_norm_N).t(), None if mean_N is None else log_norm_N - mean_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_NI: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        logits_NV, *found = ctx.saved_tensors
        grads = Gradients.of(grad_logprobs_NI, grad_entropy_N, *found)
        grad_NV = torch.empty_like(logits_NV)
        write_gradient(grad_NV, logits_NV, grads, ctx.share, ctx.temperature)
        return grad_NV, None, None, None, None


@dataclass(frozen=True)
class Gradients:
    """Gradients of a loss per token, and what the forward pass kept."""

    logprobs_NI: Tensor
    entropy_N: Tensor | None
    ids_NI: Tensor
    log_norm_N: Tensor
    mean_N: Tensor | None  # expected logit

    @classmethod
    def of(cls, logprobs_NI: Tensor | None, entropy_N: Tensor | None, *found: Any) -> Gradients:
        """Build it from autograd's arguments, contiguous for the kernels."""
        ids_NI, log_norm_N, mean_N = found
        if logprobs_NI is None:
            logprobs_NI = log_norm_N.new_zeros(ids_NI.shape)
        if entropy_N is not None:
            entropy_N = entropy_N.contiguous()
        return cls(logprobs_NI.contiguous(), entropy_N, ids_NI.contiguous(), log_norm_N, mean_N)


def write_gradient(
    grad_NV: Tensor, logits_NV: Tensor, grads: Gradients, share: VocabShare, temperature: float
) -> None:
    """Write the gradient, zero in columns that are no tokens; it may overwrite the logits."""
    kernels = kernels_for(logits_NV)
    if kernels is not None:
        kernels.write_gradient(grad_NV, logits_NV, grads, share, temperature)
        return
    grad_NV[:, share.real :] = 0.0
    local_NI, held_NI = share.places(grads.ids_NI)
    of_ids_NI = torch.where(held_NI, grads.logprobs_NI, 0.0)
    of_norm_N = -grads.logprobs_NI.sum(1)  # through log_norm, of all ids of a token
    log_norm_N = grads.log_norm_N
    mean_N = grads.mean_N
    for rows, scaled in chunks(logits_NV, share, temperature):
        prob = (scaled - log_norm_N[rows, None]).exp_()
        factor = of_norm_N[rows, None]
        if grads.entropy_N is not None:
            assert mean_N is not None
            # dH/dx = -p (x - E[x])
            factor = (scaled - mean_N[rows, None]).mul_(-grads.entropy_N[rows, None]).add_(factor)
        grad = prob.mul_(factor)
        if share.real:
            grad.scatter_add_(1, local_NI[rows], of_ids_NI[rows])
        if temperature != 1:
            grad.div_(temperature)
        grad_NV[rows, : share.real] = grad.to(grad_NV.dtype)


def chunks(
    logits_NV: Tensor, share: VocabShare, temperature: float
) -> Iterator[tuple[slice, Tensor]]:
    """FP32 logits over temperature, in chunks of rows, real columns only. Read-only."""
    step = chunk_rows(len(logits_NV), logits_NV.shape[1], host=logits_NV.device.type == "cpu")
    for start in range(0, len(logits_NV), step):
        rows = slice(start, start + step)
        chunk = logits_NV[rows, : share.real].float()
        if temperature != 1:
            if logits_NV.dtype == torch.float32:
                chunk = chunk / temperature
            else:
                chunk = chunk.div_(temperature)
        yield rows, chunk


def local_stats(
    logits_NV: Tensor, ids_NI: Tensor, share: VocabShare, temperature: float, entropy: bool = True
) -> Tensor:
    """Log-sum-exp, logits of the ids and (entropy) expected logit over this share's columns, of all
    rows: [S, N].
    """
    kernels = kernels_for(logits_NV)
    if kernels is not None:
        return kernels.statistics(logits_NV, ids_NI, share, temperature, entropy)
    local_NI, held_NI = share.places(ids_NI)
    rows, ids = ids_NI.shape
    stats_SN = torch.empty(1 + ids + entropy, rows, dtype=torch.float32, device=logits_NV.device)
    for part, scaled in chunks(logits_NV, share, temperature):
        stats_SN[:, part] = _local_stats(scaled, local_NI[part], held_NI[part], entropy)
    return stats_SN


def _local_stats(scaled: Tensor, local_NI: Tensor, held_NI: Tensor, entropy: bool = True) -> Tensor:
    """Log-sum-exp, the ids' logits (0 if on another rank), and for entropy the expected logit."""
    if scaled.shape[1] == 0:
        blank = scaled.new_zeros(len(scaled))
        logits_IN = blank.expand(local_NI.shape[1], -1)
        return stacked(blank - torch.inf, logits_IN, blank if entropy else None)
    top = scaled.amax(-1, keepdim=True)
    weights = (scaled - top).exp_()
    total = weights.sum(-1)
    logits_NI = torch.where(held_NI, scaled.gather(1, local_NI), 0.0)
    mean = weights.mul_(scaled).sum(-1) / total if entropy else None
    return stacked(total.log() + top.squeeze(1), logits_NI.t(), mean)


def stacked(log_sum_N: Tensor, logits_IN: Tensor, mean_N: Tensor | None) -> Tensor:
    """Return the statistics as one tensor, as `together` reads them."""
    means = () if mean_N is None else (mean_N[None],)
    return torch.cat((log_sum_N[None], logits_IN, *means))


def combined(
    stats_SN: Tensor, group: ProcessGroup | None, ids: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-sum-exp, the ids' logits [I, N], and if `stats_SN` has it the expected logit, of all
    ranks.
    """
    return together(gathered(stats_SN, group), ids)


def together(all_RSN: Tensor, ids: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Statistics of the whole vocabulary from those of its shares, [R, S, N]: of ranks, or of
    chunks of columns.
    """
    logits_RIN = all_RSN[:, 1 : 1 + ids]
    asked = all_RSN.shape[1] > 1 + ids
    if len(all_RSN) == 1:
        return all_RSN[0, 0], logits_RIN[0], all_RSN[0, -1] if asked else None
    log_norm_N = all_RSN[:, 0].logsumexp(0)
    parts_RN = (all_RSN[:, 0] - log_norm_N).exp()
    return log_norm_N, logits_RIN.sum(0), (parts_RN * all_RSN[:, -1]).sum(0) if asked else None


def gathered(stats_SN: Tensor, group: ProcessGroup | None) -> Tensor:
    """The statistics of every rank that has a share of the vocabulary: [R, S, N]."""
    # a pack may hold no response token, on any rank of the group alike
    if group is None or not stats_SN.shape[1]:
        return stats_SN[None]
    all_RSN = stats_SN.new_empty(group.size(), *stats_SN.shape)
    torch.distributed.all_gather_into_tensor(
        all_RSN.view(-1, stats_SN.shape[1]), stats_SN, group=group
    )
    return all_RSN


class _Among(torch.autograd.Function):
    """Logprobs and entropy among kept tokens, from their logits; `scaled_NK`: -inf where another
    rank's, or none.
    """

    @staticmethod
    def forward(
        ctx: Any, scaled_NK: Tensor, kept_NK: Tensor, ids_NI: Tensor, group: ProcessGroup | None
    ) -> Any:
        place_NI, kept_NI = _places(kept_NK, ids_NI)
        scaled_NI = scaled_NK.gather(1, place_NI)
        held_NI = kept_NI & ~scaled_NI.isneginf()
        logits_IN = scaled_NI.masked_fill(~held_NI, 0.0).t()
        log_sum_N = scaled_NK.logsumexp(1)
        mean_N = _mean(scaled_NK, log_sum_N)
        log_norm_N, logits_IN, expected_N = combined(
            stacked(log_sum_N, logits_IN, mean_N), group, ids_NI.shape[1]
        )
        assert expected_N is not None
        ctx.save_for_backward(scaled_NK, place_NI, held_NI, log_norm_N, expected_N)
        ctx.set_materialize_grads(False)
        logprobs_NI = (logits_IN - log_norm_N).t()
        # a top token that was not kept has no probability
        logprobs_NI[:, 1:].masked_fill_(~kept_NI[:, 1:], -torch.inf)
        return logprobs_NI, log_norm_N - expected_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_NI: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        scaled_NK, place_NI, held_NI, log_norm_N, mean_N = ctx.saved_tensors
        prob_NK = (scaled_NK - log_norm_N[:, None]).exp()
        grad_NK = torch.zeros_like(prob_NK)
        if grad_logprobs_NI is not None:
            label_NK = torch.zeros_like(prob_NK)
            label_NK.scatter_(1, place_NI[:, :1], held_NI[:, :1].float())
            grad_NK += grad_logprobs_NI[:, :1] * (label_NK - prob_NK)
            of_top_NM = grad_logprobs_NI[:, 1:]
            if of_top_NM.shape[1]:
                held_NM = held_NI[:, 1:]
                grad_NK.scatter_add_(1, place_NI[:, 1:], torch.where(held_NM, of_top_NM, 0.0))
                grad_NK -= of_top_NM.sum(1, keepdim=True) * prob_NK
        if grad_entropy_N is not None:
            centred_NK = scaled_NK.masked_fill(prob_NK == 0, 0.0) - mean_N[:, None]
            grad_NK -= grad_entropy_N[:, None] * prob_NK * centred_NK
        return grad_NK, None, None, None


def _places(kept_NK: Tensor, ids_NI: Tensor) -> tuple[Tensor, Tensor]:
    """Where among the kept tokens each id is, 0 if nowhere; and if it is there."""
    sorted_NK, order_NK = kept_NK.sort(1)
    at_NI = torch.searchsorted(sorted_NK, ids_NI.contiguous()).clamp(max=kept_NK.shape[1] - 1)
    kept_NI = (sorted_NK.gather(1, at_NI) == ids_NI) & (ids_NI >= 0)
    return order_NK.gather(1, at_NI).masked_fill(~kept_NI, 0), kept_NI


def among_kept(
    scaled_NK: Tensor, kept_NK: Tensor, ids_NI: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    return _Among.apply(scaled_NK, kept_NK, ids_NI, group)


def _mean(scaled_NK: Tensor, log_sum_N: Tensor) -> Tensor:
    """The expected logit among this rank's tokens, 0 where it has none."""
    prob_NK = (scaled_NK - log_sum_N[:, None]).exp().nan_to_num(0.0)
    return (prob_NK * scaled_NK.masked_fill(scaled_NK.isinf(), 0.0)).sum(1)


def logprobs_and_entropy(
    logits_NV: Tensor,
    ids_NI: Tensor,
    share: VocabShare,
    temperature: float = 1.0,
    kept_NK: Tensor | None = None,
    entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """FP32 logprobs of each token's ids and entropy of its distribution at `temperature`,
    differentiable; those of -1 mean nothing.

    `kept_NK`: among these tokens alone (-1: none), of which the ids are some. The entropy costs one
    more pass over the FP32 logits.
    """
    if kept_NK is None:
        return _Logprobs.apply(logits_NV, ids_NI, share, temperature, entropy)
    local_NK, held_NK = share.places(kept_NK)
    scaled_NK = logits_NV.gather(1, local_NK).float() / temperature
    return among_kept(scaled_NK.masked_fill(~held_NK, -torch.inf), kept_NK, ids_NI, share.group)


@dataclass(frozen=True)
class Truncation:
    """Distance of the sampler's support from the policy's own."""

    outside_N: Tensor  # bool: the policy's own top_k and top_p would have cut the sampled token
    # log of the policy's probability of the tokens that were kept: what d would be off by
    log_mass_N: Tensor


def highest(
    logits_NV: Tensor, labels_N: Tensor, share: VocabShare, temperature: float, k: int
) -> Tensor:
    """The share's k highest logits, log-sum-exp, and label's logit (0 if on another rank)."""
    found = logits_NV.new_full(
        (k + 2, len(labels_N)),
        -torch.inf,
        dtype=torch.float32,
    )
    top_NK = logits_NV[:, : share.real].topk(min(k, share.real)).values
    found[: top_NK.shape[1]] = top_NK.t().float() / temperature
    found[-2:] = local_stats(logits_NV, labels_N[:, None], share, temperature, entropy=False)
    return found


def highest_of(everyone: Tensor) -> Tensor:
    """Combine `highest` of several shares: [R, k + 2, N] to [k + 2, N]."""
    top_NK = everyone[:, :-2].flatten(0, 1).t().topk(everyone.shape[1] - 2).values
    return torch.cat(
        (
            top_NK.t(),
            everyone[:, -2].logsumexp(0)[None],
            everyone[:, -1].sum(0)[None],
        )
    )


def judged(found: Tensor, logprobs_N: Tensor, group: ProcessGroup | None, p: float) -> Truncation:
    """Compare `highest` of every rank with the support that the policy would have kept, ties with
    the last one included. `logprobs_N`: among the kept tokens.
    """
    *top, log_total_N, label_N = highest_of(gathered(found, group))
    top_NK = torch.stack(top, 1)
    above_N = (top_NK.softmax(1) * (top_NK > label_N[:, None])).sum(1)
    outside_N = (label_N < top_NK[:, -1]) | ((above_N >= p) & (p < 1))
    return Truncation(outside_N, label_N - logprobs_N - log_total_N)
