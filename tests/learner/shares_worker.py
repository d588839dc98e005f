"""A rank whose batch only the driver holds: passes and updates as with the batch on every rank."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from learner_cases import make_batch, make_targets, with_kept
from routing_worker import routed_batch

from megatron_rl.batch import Batch, Share, Targets
from megatron_rl.distributed import exchange
from megatron_rl.learner import shares
from megatron_rl.learner.learner import Learner

SMALL = 64  # bytes of a piece: several for each column
UPDATES = 2


def _targets(batch: Batch, before_N: torch.Tensor) -> Targets:
    """With everything that a loss may be given."""
    random = torch.Generator().manual_seed(4)
    more = {
        name: torch.rand(before_N.shape, generator=random)
        for name in ("ref_logprobs_N", "staleness_N", "advantages_N")
    }
    return replace(make_targets(batch, before_N), turns_N=batch.turns_N, **more)


def _trained(
    learner: Learner, share: Share, targets: Targets, parts: Sequence[torch.Tensor]
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
    join = learner.plane.join
    return {"steps": steps, "logprobs": join(before_N, share), "after": join(after_N, share)}


def shared(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """The batch on every rank; on the driver alone, in the same shares and in those of updates."""
    shares.PIECE_BYTES = SMALL
    batch = routed_batch() if job.get("experts") else with_kept(make_batch())
    batch = replace(batch, turns_N=batch.responses.place_N.int() // 3)
    targets = _targets(batch, learner.logprobs(batch))
    driven = batch if learner.is_driver else None
    plane = learner.plane
    alike = learner.split(driven)
    moved = plane.sent, plane.received
    share = learner.split(driven, UPDATES, "seed")
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
        "sent": plane.sent - moved[0],
        "received": plane.received - moved[1],
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
