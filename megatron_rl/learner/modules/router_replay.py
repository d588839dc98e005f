"""Router replay: tokens go to the experts that the sampler has sent them to, with weights of the
learner's own gate; counts of the tokens that its routers would have sent elsewhere, and their check.

Each router of megatron-core asks an object which experts to take (`router_replay`, of its
RouterReplay's form). Ours finds them in the pack that is passing through: no list that is handed
out by micro-batch, and nothing of another layer. What is computed again in a backward pass is of
the pack that it was computed for at first.

S positions of a pack, or this rank's share of them, L layers, K experts of a token, E experts.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_rl.config.schema import Router
from megatron_rl.learner.modules.observers import passing_pack
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.types import NO_EXPERT, Metrics

from megatron.core.transformer.moe.router import TopKRouter  # isort: skip

# of the replayed tokens: routers of the same weights differ in a hundredth of them, or a tenth
MOST_FLIPS = 0.5


class ReplayError(RuntimeError):
    """Router replay that replayed nothing, or experts that misfit the tokens, weights or passes."""


Choose = Callable[..., tuple[Tensor, Tensor]]


class RouterReplay:
    """Settings and counts of replay that all routers of a rank share."""

    def __init__(self, layers: int, device: torch.device, router: Router) -> None:
        self.replays = router is not Router.own
        self.compares = False  # count the differences only, do not replay
        self.trains = False  # in a pass whose activations may be computed again
        self._routers: list[_Layer] = []
        # read tokens, replayed, and own choice another
        self.counts_L3 = torch.zeros(layers, 3, device=device)

    def watch(self, model: torch.nn.Module, first_layer: int, held: int, shard: int | None) -> None:
        """`held`: the place of the first layer among those of packs; `shard`: this rank's number
        where the positions of a pack are split over ranks.
        """
        passing = passing_pack(model)
        for index, block in enumerate(model.decoder.layers):  # type: ignore[arg-type, union-attr]
            for module in block.modules():
                if isinstance(module, TopKRouter):
                    self._routers.append(
                        _Layer(self, module, first_layer + index, held + index, shard, passing)
                    )
                    module.router_replay = self._routers[-1] if self.replays else None

    @contextmanager
    def passing(self, trains: bool) -> Iterator[None]:
        """Context of a pass over packs; all of its recomputation has to happen inside."""
        self.trains = trains
        for router in self._routers:
            router.again.clear()  # of a pass that has failed
        yield
        if any(router.again for router in self._routers):
            raise ReplayError(
                "learner.router: activations were not computed again with the experts of before"
            )

    @contextmanager
    def comparing(self) -> Iterator[Tensor]:
        """Let routers choose by themselves; count the tokens that the sampler routed otherwise."""
        kept = self.counts_L3
        self.counts_L3 = torch.zeros_like(self.counts_L3)
        fused = any(router.module.config.moe_router_fusion for router in self._routers)
        self.compares = True
        try:
            for router in self._routers:
                router.module.router_replay = router
                router.module.config.moe_router_fusion = False  # the fused router bypasses replay
            yield self.counts_L3
        finally:
            self.compares = False
            self.counts_L3 = kept
            for router in self._routers:
                router.module.router_replay = router if self.replays else None
                router.module.config.moe_router_fusion = fused

    def take(self) -> Tensor:
        taken = self.counts_L3
        self.counts_L3 = torch.zeros_like(self.counts_L3)
        return taken


def shares(found_L3: Tensor) -> Metrics:
    """Metrics of all ranks' counts. Empty if no token passed."""
    found_L3[:, 0] = found_L3[:, 0].max()  # a layer with a lower count did not replay
    read, replayed, other = found_L3.sum(0).tolist()
    if not read:
        return {}
    return {"router/replayed": replayed / read, "router/flips": other / max(1.0, replayed)} | {
        f"router/{name}/layer_{layer}": part / max(1.0, whole)
        for layer, (read, replayed, other) in enumerate(found_L3.tolist())
        for name, part, whole in (("replayed", replayed, read), ("flips", other, replayed))
    }


def check(found: Metrics) -> Metrics:
    """Return the replay metrics of a step (`Learner.take_replayed`); raise if the replay failed."""
    if not found:  # no token has passed
        return found
    if not found["router/replayed"]:
        raise ReplayError(
            "learner.router: replay, but the sampler reported no experts for this step's tokens: "
            "start its servers with this recipe, or set learner.router=own"
        )
    if (flips := found["router/flips"]) > MOST_FLIPS:
        raise ReplayError(
            f"learner.router: replay, but the learner's routers would have sent {flips:.0%} of "
            "the tokens elsewhere: the reported experts are not those of these tokens, or of these "
            "weights. learner.router=own trains without replay"
        )
    return found


@dataclass(eq=False)
class _Layer:
    """Replacement of megatron-core's RouterReplay of one router."""

    replay: RouterReplay
    module: TopKRouter
    layer: int  # of the model
    held: int  # of those that packs hold
    shard: int | None
    passing: list[Pack]
    # packs whose activations are still to be recomputed, in order
    again: deque[Pack] = field(default_factory=deque)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Choose | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert default_compute_topk is not None
        values_SK, own_SK = default_compute_topk(
            scores, topk, num_groups=num_groups, group_topk=group_topk
        )
        pack, first_time = self._pack()
        here = slice((self.shard or 0) * len(scores), ((self.shard or 0) + 1) * len(scores))
        if first_time:
            self.replay.counts_L3[self.layer, 0] += pack.read_S[here].sum()
        if pack.experts_SLK is None:
            return values_SK, own_SK
        reported_SK = pack.experts_SLK[here, self.held]
        if reported_SK.shape[1] != topk:
            raise ValueError(
                f"the engine reports {reported_SK.shape[1]} experts per token, the router chooses "
                f"{topk}"
            )
        # a repeated expert marks a slot that was never written
        in_order_SK = reported_SK.sort(1).values
        reported_S1 = ((reported_SK != NO_EXPERT).all(1) & (in_order_SK.diff(dim=1) > 0).all(1))[
            :, None
        ]
        chosen_SK = torch.where(reported_S1, reported_SK.long(), own_SK)
        if first_time:
            own_SE = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, own_SK, True)
            other_S = reported_S1.squeeze(1) & ~own_SE.gather(1, chosen_SK).all(1)
            self.replay.counts_L3[self.layer, 1:] += torch.stack([reported_S1.sum(), other_S.sum()])
        if self.replay.compares:
            return values_SK, own_SK
        return scores.gather(1, chosen_SK), chosen_SK

    def _pack(self) -> tuple[Pack, bool]:
        """The passing pack, and if it passes for the first time."""
        # a checkpoint keeps none of it: it will come again
        if self.replay.trains and not torch.is_grad_enabled():
            self.again.append(self.passing[0])
        elif self.again:
            return self.again.popleft(), False
        return self.passing[0], True
