"""A rank whose batch only the driver holds: passes and updates as with the batch on every rank."""

from dataclasses import replace
from typing import Any

import torch
from learner_cases import make_batch, make_targets, with_kept
from routing_worker import routed_batch

from megatron_rl.batch import Batch, Targets
from megatron_rl.distributed import exchange
from megatron_rl.learner import shares
from megatron_rl.learner.learner import Learner

SMALL = 64  # bytes of a piece: several for each column


def _targets(batch: Batch, before_BT: torch.Tensor) -> Targets:
    """With everything that a loss may be given."""
    random = torch.Generator().manual_seed(4)
    targets = make_targets(batch, before_BT)
    more = {
        name: torch.rand(before_BT.shape, generator=random)
        for name in ("ref_logprobs_BT", "staleness_BT")
    }
    return replace(targets, advantages_BT=torch.randn(before_BT.shape, generator=random), **more)


def shared(learner: Learner, job: dict[str, Any]) -> dict[str, Any]:
    """Two passes and two minibatches of rows, twice from the same weights."""
    shares.PIECE_BYTES = SMALL
    batch = routed_batch() if job.get("experts") else with_kept(make_batch())
    batch = batch.with_matrices(
        turns_BT=torch.arange(batch.mask_BT.shape[1]).expand_as(batch.mask_BT) // 3
    )
    parts = [torch.arange(0, len(batch), 2), torch.arange(1, len(batch), 2)]
    before_BT = learner.logprobs(batch)
    whole = [learner.update(_targets(batch, before_BT).rows(rows)) for rows in parts]
    after_BT = learner.logprobs(batch)

    learner.init_random(7)
    for each in learner.optimizer.chained_optimizers:
        each.optimizer.state.clear()
    learner.steps = 0
    plane = learner.plane
    driver = learner.is_driver
    held = plane.share(batch if driver else None)
    ours_BT = learner.logprobs(held)
    passed = plane.received
    assert torch.equal(ours_BT, learner.logprobs(held))
    again = plane.received - passed
    mine = held.held.mine
    targets = plane.share_targets(
        held, _targets(held.whole, ours_BT) if held.whole is not None else None
    )
    steps = [learner.update(targets, rows) for rows in parts]
    about = {
        "replica": learner.place.dp,
        "rows": len(batch) if mine is None else len(mine),
        "tokens": len(batch.tokens_P) if mine is None else len(mine.tokens_P),
        "layers": 0 if mine is None or mine.experts_PLK is None else mine.experts_PLK.shape[1],
        "again": again,
        "sent": plane.sent,
        "received": plane.received,
    }
    last_BT = learner.logprobs(held)
    same = not driver or (torch.equal(before_BT, ours_BT) and torch.equal(after_BT, last_BT))
    empty = driver or (ours_BT.numel() == 0 and held.whole is None)
    return {
        "same": [whole == steps, same],
        "empty": exchange(empty),
        "ranks": exchange(about),
    }
