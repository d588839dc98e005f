"""The bytes of one sync link by link, and the least that any sync could move. Torch-free.

Two kinds of links carry a sync as it is built. Inside the learner, the ranks of a tensor-parallel group send their
quantized shards to the group's first rank, the writer. From there every sampler rank takes whole tensors, because
vLLM's loaders cut their own shards: one link for each pair of a writer and a sampler rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.models.model import Model
from megatron_rl.preflight.sync_plan import SyncPlan


@dataclass(frozen=True)
class SamplerLayout:
    tp: int = 1
    replicas: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.replicas


@dataclass(frozen=True)
class Links:
    """Links of one kind."""

    kind: str
    count: int
    busiest: int  # bytes on one link
    total: int  # bytes on all of them
    end: int  # bytes through the busiest end: what one network card sees
    meaning: str


@dataclass(frozen=True)
class LowerBound:
    """What no way of moving these weights, in this format, can undercut."""

    out: int  # bytes that leave the busiest learner rank, if all holders of a weight share the work
    into: int  # bytes that enter the busiest sampler rank: its own shard
    total: int  # bytes that enter all sampler ranks

    @property
    def busiest(self) -> int:
        return max(self.out, self.into)


def links(plan: SyncPlan, sampler: SamplerLayout) -> list[Links]:
    """Every kind of link that carries bytes, with its numbers."""
    dense = [sent for (_, expert_rank), sent in plan.gathers.items() if expert_rank is None]
    expert = [sent for (_, expert_rank), sent in plan.gathers.items() if expert_rank is not None]
    found = [
        _gathers("learner: gather of dense weights", dense, "a tensor-parallel rank -> the writer of its group"),
        _gathers("learner: gather of experts", expert, "an expert-tensor-parallel rank -> the writer of its group"),
    ]
    found.append(_maxima(plan))
    receivers = sampler.world
    found.append(
        Links(
            "learner -> sampler",
            len(plan.writers) * receivers,
            max(plan.writers.values(), default=0),
            plan.nbytes * receivers,
            plan.nbytes,
            "a writer's tensors -> one sampler rank, which takes whole tensors and cuts its own shard",
        )
    )
    return [each for each in found if each.count]


def lower_bound(plan: SyncPlan, model: Model, sampler: SamplerLayout) -> LowerBound:
    """Every byte leaves the learner once and each sampler rank receives its shard; samplers may pass bytes on."""
    stages: dict[int, int] = {}
    for (stage, _), nbytes in plan.writers.items():
        stages[stage] = stages.get(stage, 0) + nbytes
    # the ranks of a stage share what it holds, at best evenly: experts are split evenly as it is
    layout = model.layout
    out = max(stages.values(), default=0) // (layout.tp * layout.cp * layout.dp)
    shard = plan.whole_bytes + plan.split_bytes // sampler.tp
    shard += plan.key_value_bytes // min(sampler.tp, model.shape.kv_heads)
    return LowerBound(out, shard, shard * sampler.world)


def _gathers(kind: str, groups: list[tuple[int, ...]], meaning: str) -> Links:
    sent = [nbytes for of_ranks in groups for nbytes in of_ranks if nbytes]
    return Links(kind, len(sent), max(sent, default=0), sum(sent), max(map(sum, groups), default=0), meaning)


def _maxima(plan: SyncPlan) -> Links:
    """An all-reduce around a ring passes nearly twice its bytes over each of its links."""
    rings = [(len(plan.gathers[group]) + 1, nbytes) for group, nbytes in plan.maxima.items()]
    each = [2 * (size - 1) * nbytes // size for size, nbytes in rings]
    return Links(
        "learner: row maxima",
        sum(size for size, _ in rings),
        max(each, default=0),
        sum(size * nbytes for (size, _), nbytes in zip(rings, each, strict=True)),
        max(each, default=0),
        "around a tensor-parallel group, so that shards of one row get one scale",
    )
