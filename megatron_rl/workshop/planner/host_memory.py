"""Bytes of the first node's own memory, where its GPUs work: what a job's limit (`--mem`) has to leave room for."""

from __future__ import annotations

from megatron_rl.config.schema import Config, Sleep, Transport
from megatron_rl.preflight.placement import WORKER_GIB
from megatron_rl.preflight.roles import Roles
from megatron_rl.workshop.planner.engine_memory import GIB, EngineMemory
from megatron_rl.workshop.planner.workload import Workload

PROCESS = 5 * GIB  # of one that uses a GPU: libraries, CUDA's own, what loading leaves. An assumption
VERSIONS = 2  # of the weights in shared memory: the one that is served, and the next


def pinned(nbytes: float) -> int:
    """What torch takes for a buffer that GPUs copy into: the next power of two."""
    return 1 << (max(int(nbytes), 1) - 1).bit_length()


def of_first_node(config: Config, roles: Roles, engine: EngineMemory, work: Workload, kept: float) -> dict[str, float]:
    """By what it is for. `kept`: a checkpoint's bytes, of which each rank copies its share before it writes them."""
    ranks, engines = roles.tasks_per_node, len(roles.local)
    shared = config.sync.transport == Transport.file and config.sync.dir is None
    found = {
        "checkpoint, pinned": ranks * pinned(kept / roles.learner),
        "processes": (ranks + engines + 1) * PROCESS + config.reward.workers * WORKER_GIB * GIB,
        "sync, in shared memory": VERSIONS * engine.weights * roles.engine_tp * shared,
        "the sleeping engine's weights": engines * engine.weights * (config.sampler.sleep == Sleep.offload),
        "batches that wait": work.waiting_bytes(config.rollout.ahead),
    }
    return {part: nbytes for part, nbytes in found.items() if nbytes}
