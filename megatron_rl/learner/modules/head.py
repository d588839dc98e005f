"""Output layer: hidden states to logprobs, of labels and top tokens, and entropy; comparison of
sampling supports (top_k, top_p); large logits in parts.

Logits of few bytes are held, from the layer itself. Others never exist as a whole: so many columns
of the vocabulary are made at a time, for all tokens, and again in backward, where they become their
own gradient in place. What stays of a token are the numbers that shares of the vocabulary are put
together by, over columns here as over ranks (logprobs.py); among kept tokens their logits stay, and
no column is made twice. The weight's gradient is the plain layer's product; that of the hidden
states is added up in FP32.

N tokens, H hidden width, V columns of this rank's share of the vocabulary, C those of them that are
made at once, K kept and M top tokens of each token at most, I ids of each token: the label, then
its top tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_rl.learner.modules import logprobs
from megatron_rl.learner.modules.context import everywhere
from megatron_rl.learner.modules.costs import logit_columns
from megatron_rl.learner.modules.linear import is_wide, wide_product
from megatron_rl.learner.modules.logprobs import Gradients, Truncation, VocabShare
from megatron_rl.learner.modules.packing import Pack


@dataclass(frozen=True)
class LogprobRequest:
    """Values that a pass computes per token, and how."""

    share: VocabShare
    temperature: float
    entropy: bool = True  # one more pass over the FP32 logits
    top_k: int | None = None  # compare the sampler's support with the policy's own; None: not
    top_p: float = 1.0
    top: bool = False  # logprobs of the pack's top tokens too


@dataclass(frozen=True)
class LogprobOutput:
    """FP32 logprob and entropy of each response token, with a gradient; the truncation without."""

    logprobs_N: Tensor
    entropy_N: Tensor | None
    truncation: Truncation | None
    # of `Pack.top_NM`, with a gradient, 0 of padding; None: not requested
    top_logprobs_NM: Tensor | None = None


def scores(
    layer: ColumnParallelLinear,
    hidden_N1H: Tensor,
    weight_VH: Tensor | None,
    pack: Pack,
    asked: LogprobRequest,
    held: bool,
) -> LogprobOutput:
    """Scores of a pack's response tokens, as `asked` specifies.

    `weight_VH` replaces the layer's own weight; `held`: all logits are made at once.
    """
    own_VH = layer.weight if weight_VH is None else weight_VH
    wide = is_wide(layer)
    columns = logit_columns(len(hidden_N1H), len(own_VH), own_VH.element_size(), wide)
    labels_N = pack.labels_N
    kept_NK = pack.kept_NK
    share = asked.share
    top_NM = pack.top_NM if asked.top else None
    ids_NI = labels_N[:, None]
    if top_NM is not None:
        ids_NI = torch.cat((ids_NI, top_NM), 1)
    how = HeadContext(asked, columns, wide, layer.tp_group if layer.allreduce_dgrad else None)
    hidden_NH = hidden_N1H.squeeze(1)
    highest = None
    if held or columns >= len(own_VH):
        logits_NV = layer(hidden_N1H, weight=weight_VH)[0].squeeze(1)
        logprobs_NI, entropy_N = logprobs.logprobs_and_entropy(
            logits_NV, ids_NI, share, asked.temperature, kept_NK, asked.entropy
        )
        if kept_NK is not None and asked.top_k is not None:
            highest = logprobs.highest(
                logits_NV.detach(), labels_N, share, asked.temperature, asked.top_k
            )
    elif kept_NK is None:
        logprobs_NI, entropy_N = _Head.apply(hidden_NH, own_VH, ids_NI, how)
    else:
        scaled_NK, highest = _KeptLogits.apply(hidden_NH, own_VH, labels_N, kept_NK, how)
        logprobs_NI, entropy_N = logprobs.among_kept(scaled_NK, kept_NK, ids_NI, share.group)
    logprobs_N = logprobs_NI[:, 0]
    top_logprobs_NM = None
    if top_NM is not None:
        top_logprobs_NM = logprobs_NI[:, 1:].masked_fill(top_NM < 0, 0.0)
    support = None
    if highest is not None:
        support = logprobs.judged(highest, logprobs_N.detach(), share.group, asked.top_p)
    return LogprobOutput(logprobs_N, entropy_N, support, top_logprobs_NM)


def everyones(found: LogprobOutput, pack: Pack) -> LogprobOutput:
    """Scores of all response tokens of a pack, on each rank that shares it."""
    if pack.held_N is None:
        return found
    entropy_N = found.entropy_N
    support = found.truncation
    if support is not None:
        outside_N = everywhere(support.outside_N.float(), pack).bool()
        support = Truncation(outside_N, everywhere(support.log_mass_N, pack))
    entropy_N = None if entropy_N is None else everywhere(entropy_N, pack)
    top_NM = found.top_logprobs_NM
    top_NM = None if top_NM is None else everywhere(top_NM, pack)
    return LogprobOutput(everywhere(found.logprobs_N, pack), entropy_N, support, top_NM)


@dataclass(frozen=True)
class HeadContext:
    asked: LogprobRequest
    columns: int  # at once
    wide: bool  # logits in FP32 of a BF16 layer
    group: Any  # the ranks that add up the hidden states' gradient; None: there is nothing to add

    def logits(self, hidden_NH: Tensor, weight_CH: Tensor) -> Tensor:
        if self.wide:
            return wide_product(hidden_NH, weight_CH)
        return hidden_NH.matmul(weight_CH.t())

    def backward(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        trained: bool,
        gradient: Callable[[Tensor, VocabShare], Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of both, by `gradient` of the logits that some rows of the weight make; None of
        a frozen weight.
        """
        # rows that only pad the share stay so
        grad_weight_VH = torch.zeros_like(weight_VH) if trained else None
        sum_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        for columns, part in self.asked.share.parts(self.columns):
            if part.real:
                weight_CH = weight_VH[columns]
                grad_NC = gradient(weight_CH, part)
                if grad_weight_VH is not None:
                    torch.mm(grad_NC.t(), hidden_NH, out=grad_weight_VH[columns])
                sum_NH.add_(grad_NC.matmul(weight_CH))
                del grad_NC
        grad_NH = sum_NH.to(hidden_NH.dtype)
        if self.group is not None:
            dist.all_reduce(grad_NH, group=self.group)
        return grad_NH, grad_weight_VH


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, ids_NI: Tensor, how: HeadContext
    ) -> Any:
        asked = how.asked
        ids = ids_NI.shape[1]
        logits_IN = torch.zeros(ids_NI.t().shape, dtype=torch.float32, device=ids_NI.device)
        stats = []
        for columns, part in asked.share.parts(how.columns):
            logits_NC = how.logits(hidden_NH, weight_VH[columns])
            found_SN = logprobs.local_stats(
                logits_NC, ids_NI, part, asked.temperature, asked.entropy
            )
            # an id's logit is in one part, 0 in the others
            logits_IN += found_SN[1 : 1 + ids]
            stats.append(torch.cat((found_SN[:1], found_SN[1 + ids :])))
            del logits_NC
        log_sum_N, _, mean_N = logprobs.together(torch.stack(stats), 0)
        log_norm_N, logits_IN, mean_N = logprobs.combined(
            logprobs.stacked(log_sum_N, logits_IN, mean_N), asked.share.group, ids
        )
        ctx.save_for_backward(hidden_NH, weight_VH, ids_NI, log_norm_N, mean_N)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return (logits_IN - log_norm_N).t(), None if mean_N is None else log_norm_N - mean_N

    @staticmethod
    def backward(ctx: Any, grad_logprobs_NI: Tensor | None, grad_entropy_N: Tensor | None) -> Any:
        hidden_NH, weight_VH, *found = ctx.saved_tensors
        how = ctx.how
        grads = Gradients.of(grad_logprobs_NI, grad_entropy_N, *found)

        def gradient(weight_CH: Tensor, part: VocabShare) -> Tensor:
            logits_NC = how.logits(hidden_NH, weight_CH)
            if how.wide:
                grad_NC = torch.empty_like(logits_NC, dtype=weight_CH.dtype)
            else:
                grad_NC = logits_NC
            logprobs.write_gradient(grad_NC, logits_NC, grads, part, how.asked.temperature)
            return grad_NC

        return *how.backward(hidden_NH, weight_VH, ctx.needs_input_grad[1], gradient), None, None


class _KeptLogits(torch.autograd.Function):
    """Logits of kept tokens over temperature, -inf if on another rank; and each token's highest."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        kept_NK: Tensor,
        how: HeadContext,
    ) -> Any:
        asked = how.asked
        highest = []
        scaled_NK = torch.full_like(kept_NK, -torch.inf, dtype=torch.float32)
        for columns, part in asked.share.parts(how.columns):
            logits_NC = how.logits(hidden_NH, weight_VH[columns])
            local_NK, held_NK = part.places(kept_NK)
            if part.real:
                scaled_NK = torch.where(
                    held_NK, logits_NC.gather(1, local_NK).float() / asked.temperature, scaled_NK
                )
            if asked.top_k is not None:
                highest.append(
                    logprobs.highest(logits_NC, labels_N, part, asked.temperature, asked.top_k)
                )
            del logits_NC
        ctx.save_for_backward(hidden_NH, weight_VH, kept_NK)
        ctx.how = how
        if not highest:
            return scaled_NK, None
        support = logprobs.highest_of(torch.stack(highest))
        ctx.mark_non_differentiable(support)
        return scaled_NK, support

    @staticmethod
    def backward(ctx: Any, grad_NK: Tensor, _: None) -> Any:
        hidden_NH, weight_VH, kept_NK = ctx.saved_tensors
        grad_NK = grad_NK / ctx.how.asked.temperature

        def gradient(weight_CH: Tensor, part: VocabShare) -> Tensor:
            local_NK, held_NK = part.places(kept_NK)
            grad_NC = hidden_NH.new_zeros(len(hidden_NH), part.real)
            return grad_NC.scatter_add_(
                1, local_NK, torch.where(held_NK, grad_NK, 0.0).to(grad_NC.dtype)
            )

        return (
            *ctx.how.backward(hidden_NH, weight_VH, ctx.needs_input_grad[1], gradient),
            None,
            None,
            None,
        )
