"""How often the learner's routers send a token to other experts than the engine's did: two policies, not one rounded.

S positions of a pack (of this rank, where they are split), E experts, K experts of each token, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_rl.learner.packing import Pack
from megatron_rl.types import Batch

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner

NO_EXPERT = -1


def router_flips(learner: Learner, batch: Batch, chosen_BSLK: Tensor) -> dict[str, float]:
    """The share of tokens of which some expert differs, in each layer and over all; `chosen_BSLK` is the engine's.

    -1 where there is no token, or no expert in a layer.
    """
    counts_L2 = torch.zeros(learner.shape.layers, 2)
    with _watching(learner, chosen_BSLK, counts_L2):
        learner.logprobs_unseen(batch)
    found = learner.ranks.sum(counts_L2).tolist()
    shares = {layer: flips / tokens for layer, (flips, tokens) in enumerate(found) if tokens}
    if not shares:
        return {}
    flips, tokens = (sum(column) for column in zip(*found, strict=True))
    return {"sync/router_flips": flips / tokens} | {
        f"sync/router_flips/layer_{layer}": share for layer, share in shares.items()
    }


@contextmanager
def _watching(learner: Learner, chosen_BSLK: Tensor, counts_L2: Tensor) -> Iterator[None]:
    shard = learner.place.tp if learner.megatron_config.sequence_parallel else None
    handles: list[Any] = []
    for chunk, policy in enumerate(learner.modules):
        passing: list[Pack] = []
        handles.append(policy.register_forward_pre_hook(partial(_remember, passing), with_kwargs=True))
        first = learner.layout.layers(learner.shape.layers, learner.place.pp, chunk).start
        for layer, block in enumerate(policy.decoder.layers, first):
            for module in block.modules():
                if isinstance(module, TopKRouter):
                    see = partial(_count, chosen_BSLK[:, :, layer], counts_L2[layer], passing, shard)
                    handles.append(module.register_forward_hook(see))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _remember(passing: list[Pack], policy: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    passing[:] = [kwargs["pack"]]


def _count(
    chosen_BSK: Tensor, counts_2: Tensor, passing: list[Pack], shard: int | None, module: Any, args: Any, output: Any
) -> None:
    (pack,), (_, chosen_SE) = passing, output
    here = len(chosen_SE)
    wanted_SK = _of_pack(pack, chosen_BSK)[(shard or 0) * here :][:here].to(chosen_SE.device)
    real_S = (wanted_SK != NO_EXPERT).all(1)
    same_S = chosen_SE.gather(1, wanted_SK.clamp(min=0)).bool().all(1)
    counts_2 += torch.stack([(real_S & ~same_S).sum(), real_S.sum()]).cpu()


def _of_pack(pack: Pack, chosen_BSK: Tensor) -> Tensor:
    """The engine's choices at the positions of a pack, -1 at its filler."""
    starts = pack.starts.tolist()
    spans = [end - start for start, end in pairwise(starts)][: len(pack.rows)]
    if spans:
        spans[-1] -= len(pack.tokens_S) - pack.tokens
    parts = [chosen_BSK[row, :span].long() for row, span in zip(pack.rows, spans, strict=True)]
    filler = torch.full((len(pack.tokens_S) - pack.tokens, chosen_BSK.shape[2]), NO_EXPERT)
    return torch.cat([*parts, filler])
