"""Which GPUs of a machine work for the learner, for engines, or for both."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.fleet import is_fleet
from megatron_rl.config.schema import SamplerSection
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.placement import gpus_of_engines


@dataclass(frozen=True)
class Roles:
    """Ranks of the learner take the first GPUs of each of their nodes; engines of the run are on the first node."""

    learner: int  # ranks
    engines: int
    engine_tp: int
    distant: int  # of the engines: servers on other nodes
    per_node: int  # GPUs
    local: tuple[int, ...]  # GPUs of the first node that engines use
    shared: tuple[int, ...]  # of them: those of the learner, too

    @property
    def learner_nodes(self) -> int:
        return -(-self.learner // self.per_node)

    @property
    def tasks_per_node(self) -> int:
        return min(self.learner, self.per_node)

    @property
    def gpus(self) -> int:
        return self.learner + len(self.local) - len(self.shared) + self.distant * self.engine_tp

    @property
    def nodes(self) -> int:
        servers = max(self.per_node // self.engine_tp, 1)  # of a node
        return self.learner_nodes + -(-self.distant // servers)

    @property
    def kinds(self) -> dict[str, int]:
        """What GPUs are used for, and how many."""
        counts = {
            "learner": self.learner - len(self.shared),
            "learner and engine": len(self.shared),
            "engine": self.gpus - self.learner,
        }
        return {kind: count for kind, count in counts.items() if count}


def roles(layout: Layout, sampler: SamplerSection, per_node: int) -> Roles:
    """`per_node`: GPUs of a node; 0 for a host without, where each process stands for one."""
    distant = len(sampler.fleet.addresses)
    started = sampler.fleet.replicas if is_fleet(sampler) else 1
    size = per_node or layout.world + started * sampler.tensor_parallel
    beside = range(layout.world, layout.world + started * sampler.tensor_parallel)
    local = tuple(sorted(gpus_of_engines(sampler))) if per_node else tuple(beside)
    shared = tuple(gpu for gpu in local if gpu < min(layout.world, size))
    return Roles(layout.world, started + distant, sampler.tensor_parallel, distant, size, local, shared)
