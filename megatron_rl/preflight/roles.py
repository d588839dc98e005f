"""Roles of a machine's GPUs by a recipe: for the learner, for engines, or for both; rules of
checks.py on GPU counts and on the memory of a CPU machine. Torch-free.

python -m megatron_rl.preflight.roles RECIPE [key=value ...]

prints, for the batch scripts: ranks of the learner, servers on other nodes, GPUs of each, sync.dir,
the run's folder.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_rl.config import ConfigError, read, schema
from megatron_rl.config.fleet import HOST_CACHE_BYTES, distant, gpus_of_engines, own_engines
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.machine import Machine, installed_gib

# memory of an idle process, as measured
RANK_GIB = 0.6
WORKER_GIB = 0.03


@dataclass(frozen=True)
class Roles:
    """Ranks of the learner take the first GPUs of each of their nodes; engines of the run are on
    the first node.
    """

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
        """Number of GPUs by use."""
        counts = {
            "learner": self.learner - len(self.shared),
            "learner and engine": len(self.shared),
            "engine": self.gpus - self.learner,
        }
        return {kind: count for kind, count in counts.items() if count}


def roles(layout: Layout, sampler: schema.SamplerSection, per_node: int) -> Roles:
    """Return the roles of GPUs. `per_node`: GPUs of a node; 0 on CPU machines, where each process
    counts as one.
    """
    started = own_engines(sampler)
    total = layout.world + started * sampler.tensor_parallel
    width = per_node or total
    beside = range(layout.world, total)
    local = tuple(sorted(gpus_of_engines(sampler)) if per_node else beside)
    shared = tuple(gpu for gpu in local if gpu < min(layout.world, width))
    return Roles(
        layout.world,
        sampler.engines,
        sampler.tensor_parallel,
        sampler.engines - started,
        width,
        local,
        shared,
    )


def ranks(
    machine: Machine, learner: schema.LearnerSection, sampler: schema.SamplerSection
) -> Iterator[str]:
    """Check that each rank of the learner has a GPU; servers of the job run on other nodes."""
    world = Layout.from_config(learner).world
    there = machine.nodes * machine.gpus
    if not there:
        return
    servers = sampler.engines * sampler.tensor_parallel if sampler.dedicated_nodes else 0
    if servers and sampler.tensor_parallel > machine.gpus:
        one = f"sampler.tensor_parallel: {sampler.tensor_parallel}, but a server has the GPUs of one node"
        yield f"{one}, and a node has {machine.gpus}; lower it"
    if servers and world + servers > there:
        yield (
            f"sampler.engines: {sampler.engines} of {sampler.tensor_parallel} GPU(s) "
            f"each beside {world} ranks of the learner are {world + servers} GPUs, but {machine} "
            f"has {there}; lower one of them"
        )
    elif world > there:
        sizes = f"tensor_parallel {learner.tensor_parallel} x pipeline_parallel {learner.pipeline_parallel}"
        if learner.context_parallel > 1:
            sizes += f" x context_parallel {learner.context_parallel}"
        yield (
            f"learner: {sizes} x data_parallel {learner.data_parallel} is {world} ranks of a GPU "
            f"each, but {machine} has {there}; lower one of them, or set run.device=cpu"
        )


def engine_gpus(
    machine: Machine, sampler: schema.SamplerSection, learner: schema.LearnerSection
) -> Iterator[str]:
    """Check that the engines' GPUs exist and are not used by the learner."""
    if machine.kind == schema.Device.cpu or not machine.gpus:
        return
    found = roles(Layout.from_config(learner), sampler, machine.gpus)
    if beyond := [number for number in found.local if number >= machine.gpus]:
        yield (
            f"sampler.devices: {','.join(map(str, beyond))} of the engine's GPUs, but a node has 0 "
            f"to {machine.gpus - 1} ({machine}); name others, or lower "
            f"sampler.tensor_parallel={sampler.tensor_parallel}"
        )
    if (
        found.shared
        and sampler.sleep == schema.Sleep.none
        and sampler.vllm.get("gpu_memory_utilization") is None
    ):
        yield (
            f"sampler.devices: the engine and the learner share GPU {','.join(map(str, found.shared))}, "
            "and by itself vLLM takes nearly all memory; name other GPUs, or set "
            "sampler.vllm.gpu_memory_utilization (such as 0.3), or sampler.sleep"
        )


def host_memory(
    machine: Machine,
    sampler: schema.SamplerSection,
    learner: schema.LearnerSection,
    reward: schema.RewardSection,
) -> Iterator[str]:
    """Check that idle processes and KV caches fit into memory: the kernel kills processes that
    exceed it.
    """
    if machine.kind != schema.Device.cpu:  # GPU machines have enough, and may be elsewhere
        return
    ranks = Layout.from_config(learner).world
    engines = own_engines(sampler) * sampler.tensor_parallel
    cache = (sampler.vllm.get("kv_cache_memory_bytes") or HOST_CACHE_BYTES) / (1 << 30)
    parts = {
        f"learner.data_parallel={learner.data_parallel} ({ranks} ranks)": ranks * RANK_GIB,
        f"reward.workers={reward.workers}": reward.workers * WORKER_GIB,
        f"sampler.vllm.kv_cache_memory_bytes of {engines} engine rank(s)": engines * cache,
    }
    installed = installed_gib()
    wanted = sum(parts.values())
    if wanted > installed:
        each = ", ".join(f"{part} {gib:.0f}" for part, gib in parts.items())
        yield f"memory: {wanted:.0f} GiB ({each}), this machine has {installed:.0f}; lower the largest"


def reach(sampler: schema.SamplerSection, sync: schema.SyncSection) -> Iterator[str]:
    """Report a sync folder that servers on other machines cannot read."""
    elsewhere = distant(sampler)
    if sampler.dedicated_nodes and not elsewhere:
        elsewhere = ["a server on another node"]
    if elsewhere and sync.dir is None:
        yield (
            f"sync.dir: null is shared memory of this machine, which {elsewhere[0]} cannot read; "
            "name a folder on a file system that it shares"
        )


def for_a_job(recipe: str, overrides: Sequence[str]) -> str:
    """Return the sizes that batch scripts need; only unreadable recipes fail, as the dry run checks
    the rest.
    """
    config, _ = read(recipe, overrides)
    sampler = config.sampler
    servers = 0
    if sampler.dedicated_nodes and not sampler.addresses:  # servers given by address exist already
        servers = sampler.engines
    ranks = Layout.from_config(config.learner).world
    run = f"{config.run.root}/{config.run.name}"
    return f"{ranks} {servers} {sampler.tensor_parallel} {config.sync.dir} {run}"


if __name__ == "__main__":
    try:
        print(for_a_job(sys.argv[1], sys.argv[2:]))
    except ConfigError as error:
        sys.exit("\n".join(f"error: {line}" for line in str(error).splitlines()))
