"""A rank whose batch only the driver holds: passes and updates as with the batch on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from learner_cases import make_batch, make_targets, with_kept
from routing_worker import routed_batch

from megatron_rl.batch import Batch, Share, UpdateInputs
from megatron_rl.distributed import exchange
from megatron_rl.learner import shares
from megatron_rl.learner.learner import Learner

SMALL = 64  # bytes of a piece: several for each column
UPDATES = 2


class Traffic:
    """torch.distributed that counts the bytes which a rank sends and receives."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.sent = 0
        self.received = 0

    def send(self, data: torch.Tensor, to: int) -> None:
        self.sent += data.nbytes
        dist.send(data, to)

    def recv(self, data: torch.Tensor, source: int) -> None:
        self.received += data.nbytes
        dist.recv(data, source)

    def broadcast(
        self, data: torch.Tensor, src: int, group: dist.ProcessGroup | None = None
    ) -> None:
        if self._rank == src:
            self.sent += data.nbytes
        else:
            self.received += data.nbytes
        dist.broadcast(data, src=src, group=group)


def _targets(batch: Batch, before_N: torch.Tensor) -> UpdateInputs:
    """With everything that a loss may be given."""
    random = torch.Generator().manual_seed(4)
    more = {
        name: torch.rand(before_N.shape, generator=random)
        for name in ("ref_logprobs_N", "staleness_N", "advantages_N")
    }
    return replace(make_targets(batch, before_N), turns_N=batch.turns_N, **more)


def _trained(
    learner: Learner, share: Share, targets: UpdateInputs, parts: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Two passes and minibatches of rows, always from the same weights."""
    learner.init_random(7)
    for each in learner.optimizer.chained_optimizers:
        each.optimizer.state.clear()
    learner.steps = 0
    own = targets.rows(share.own)
    before_N = learner.logprobs(share)
    steps = [learner.update(share, own, rows) for rows in parts]
    after_N = learner.logprobs(share)
    join = learner.data_plane.join
    return {"steps": steps, "logprobs": join(before_N, share), "after": join(after_N, share)}


def shared(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """The batch on every rank; on the driver alone, in the same shares and in those of updates."""
    shares.PIECE_BYTES = SMALL
    batch = routed_batch() if job.get("experts") else with_kept(make_batch())
    batch = replace(batch, turns_N=batch.responses.place_N.int() // 3)
    targets = _targets(batch, learner.logprobs(batch))
    driven = batch if learner.is_driver else None
    plane = learner.data_plane
    alike = learner.split(driven)
    traffic = Traffic(learner.rank)
    shares.dist = traffic
    share = learner.split(driven, UPDATES, "seed")
    shares.dist = dist
    everywhere, alike, apart = (
        _trained(learner, one, targets, share.minibatches)
        for one in (learner.part(batch), alike, share)
    )
    mine = share.batch
    about = {
        "rows": share.own.tolist(),
        "tokens": len(mine.tokens_P),
        "layers": 0 if mine.experts_PLK is None else mine.experts_PLK.shape[1],
        "bytes": sum(one.nbytes for name, one in mine.columns.items() if not name.endswith("_B")),
        "sent": traffic.sent,
        "received": traffic.received,
    }
    # stages have the experts of their own layers
    collected = plane.collect(share, replace(mine, experts_PLK=None).columns)
    return {
        "everywhere": everywhere,
        "alike": alike,
        "apart": apart,
        "updates": [len(rows) for rows in share.minibatches],
        "collected": exchange(
            [torch.equal(one, batch.columns[name]) for name, one in collected.items()]
        ),
        "ranks": exchange(about),
    }
