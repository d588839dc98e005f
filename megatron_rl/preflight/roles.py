"""Which GPUs of a machine work for the learner, for engines, or for both.

python -m megatron_rl.preflight.roles RECIPE [key=value ...]     for the batch scripts: ranks of the learner,
                                                                      servers on other nodes, GPUs of each, sync.dir,
                                                                      and where the run will be
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.config import ConfigError, read
from megatron_rl.config.fleet import gpus_of_engines, is_fleet, size
from megatron_rl.config.schema import SamplerSection
from megatron_rl.models.layout import Layout


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
    distant = size(sampler) - sampler.fleet.replicas
    started = sampler.fleet.replicas if is_fleet(sampler) else sampler.engines
    width = per_node or layout.world + started * sampler.tensor_parallel
    beside = range(layout.world, layout.world + started * sampler.tensor_parallel)
    local = tuple(sorted(gpus_of_engines(sampler))) if per_node else tuple(beside)
    shared = tuple(gpu for gpu in local if gpu < min(layout.world, width))
    return Roles(layout.world, started + distant, sampler.tensor_parallel, distant, width, local, shared)


def for_a_job(recipe: str, overrides: Sequence[str]) -> str:
    """What is wrong with the recipe is found by the dry run that follows: only what cannot be read ends it here."""
    config, _ = read(recipe, overrides)
    fleet = config.sampler.fleet
    servers = 0 if fleet.addresses else fleet.servers  # given ones are there already
    ranks, run = Layout.from_config(config.learner).world, f"{config.run.root}/{config.run.name}"
    return f"{ranks} {servers} {config.sampler.tensor_parallel} {config.sync.dir} {run}"


if __name__ == "__main__":
    try:
        print(for_a_job(sys.argv[1], sys.argv[2:]))
    except ConfigError as error:
        sys.exit("\n".join(f"error: {line}" for line in str(error).splitlines()))
