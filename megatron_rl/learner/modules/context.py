"""Context parallelism: splits sequences of a pack, joins values of response tokens.

A sequence is cut into twice as many parts of one length as there are ranks, and rank r has the r-th
from the start and the r-th from the end: under a causal mask all have as much to do. That is
Transformer Engine's layout, whose attention passes keys and values around on GPUs; on CPUs ours
gathers them. Positions, tokens and the routers' choices are split alike. A response token is scored
by the rank that has the position before it, and its numbers are joined: each rank computes the loss
of whole rows, of which gradients reach its own tokens alone.

S positions of this rank, N response tokens.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.learner.modules import cpu  # noqa: F401  # before megatron

from megatron.core import parallel_state  # isort: skip
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region  # isort: skip

from megatron_rl.learner.modules.packing import Bucket, Pack


def split(pack: Pack, rank: int, ranks: int) -> Pack:
    """Return the part of a pack that one of `ranks` ranks holds."""
    spans = pack.starts.diff().long()
    part_S = pack.positions_S * 2 * ranks // torch.repeat_interleave(spans, spans)
    owner_S = torch.minimum(part_S, 2 * ranks - 1 - part_S)
    joined_S = owner_S.argsort(stable=True)
    order_S = torch.empty_like(joined_S).index_copy(0, joined_S, torch.arange(len(joined_S)))
    held_S = joined_S.chunk(ranks)[rank]
    held_N = (owner_S[pack.logit_index_N] == rank).nonzero().flatten()
    none = torch.zeros(0, dtype=torch.int64)
    assert pack.real_S is not None
    return replace(
        pack,
        tokens_S=pack.tokens_S[held_S],
        positions_S=pack.positions_S[held_S],
        logit_index_N=order_S[pack.logit_index_N[held_N]] - rank * len(held_S),
        labels_N=pack.labels_N[held_N],
        kept_NK=None if pack.kept_NK is None else pack.kept_NK[held_N],
        top_NM=None if pack.top_NM is None else pack.top_NM[held_N],
        experts_SLK=None if pack.experts_SLK is None else pack.experts_SLK[held_S],
        read_S=pack.read_S[held_S],
        buckets=tuple(Bucket(1, span) for span in spans.tolist()),
        padded_index_X=none,
        packed_index_S=none,
        blanks=none,
        real_S=pack.real_S[held_S],
        held_S=held_S,
        order_S=order_S,
        held_N=held_N,
    )


def whole(x_S: Tensor, pack: Pack) -> Tensor:
    """All ranks' rows in the order of the pack; gradients of all ranks add up."""
    assert pack.order_S is not None
    group = parallel_state.get_context_parallel_group()
    return gather_from_sequence_parallel_region(x_S, group=group).index_select(0, pack.order_S)


def everywhere(values_N: Tensor, pack: Pack) -> Tensor:
    """Join the values of response tokens over the ranks that share the pack, on each of them."""
    if pack.held_N is None:
        return values_N
    return _Joined.apply(values_N, pack)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_N: Tensor, pack: Pack) -> Tensor:
        assert pack.held_N is not None
        ctx.pack = pack
        whole_N = values_N.new_zeros(pack.answered, *values_N.shape[1:]).index_copy(
            0, pack.held_N, values_N
        )
        dist.all_reduce(whole_N, group=parallel_state.get_context_parallel_group())
        return whole_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:
        return grad_N.index_select(0, ctx.pack.held_N), None
