"""The memory of each kind of GPU in each phase of a step, by what it is for, and whether it is there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megatron_rl.config.schema import Sleep, SyncSection, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.placement import RANK_GIB
from megatron_rl.preflight.plan.engine_memory import GIB, EngineMemory
from megatron_rl.preflight.plan.learner_memory import LearnerMemory
from megatron_rl.preflight.plan.weights import BF16, EngineWeights

PHASES = ("rollout", "prox", "update", "sync", "save")
USABLE = 0.99  # of what a GPU is sold with
TIGHT = 0.05  # of it: a smaller margin is called tight
CONTEXT = 0.8 * GIB  # CUDA's own, with the kernels of torch, Transformer Engine and cuBLAS
COMMUNICATOR = 0.3 * GIB  # NCCL's buffers for a group of ranks
SLACK = 0.06  # of what comes and goes: what torch's allocator holds and cannot use
BUCKETS = 2 * (64 << 20)  # weight_sync/buckets.py


@dataclass(frozen=True)
class Memory:
    """Of one kind of GPU. Part -> bytes, for each phase."""

    kind: str
    gpus: int
    phases: Mapping[str, Mapping[str, float]]
    limit: float | None  # bytes that a GPU has; None: not known
    what: str = "a GPU of"

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: sum(self.phases[phase].values()))

    @property
    def peak(self) -> float:
        return sum(self.phases[self.peak_phase].values())

    @property
    def margin(self) -> float | None:
        return None if self.limit is None else self.limit - self.peak

    @property
    def verdict(self) -> str:
        if self.limit is None or self.margin is None:
            return "not known"
        if self.margin < 0:
            return "does not fit"
        return "tight" if self.margin < TIGHT * self.limit else "fits"


def learner_phases(memory: LearnerMemory, model: Model, host: bool = False) -> dict[str, dict[str, float]]:
    """Of a GPU that works for the learner alone, or of a rank on a host."""
    runtime = {"CUDA, NCCL": CONTEXT + COMMUNICATOR * communicators(model.layout)}
    held = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "masters, moments": memory.optimizer,
        "reference policy": memory.reference,
        **({"process": RANK_GIB * GIB} if host else runtime),
    }
    logits = 2 * memory.logits + memory.logit_chunks
    at_logits = memory.of_logits >= memory.recomputed + memory.gradients_of_layer
    update = {
        "activations": memory.activations + (memory.head if at_logits else 0.0),
        "logits": logits if at_logits else 0.0,
        "recomputed layers": 0.0 if at_logits else memory.recomputed + memory.gradients_of_layer,
    }
    passing = {
        "rollout": {},
        "prox": {"forward pass": memory.forward, "reference policy": memory.reference},
        "update": update,
        "sync": {"sync": staging(model)},
        "save": {},
    }
    return {phase: _together(held, passing[phase]) for phase in PHASES}


def _together(held: Mapping[str, float], passing: Mapping[str, float]) -> dict[str, float]:
    """The policy that takes the reference's place for a while is kept beside it."""
    found = dict(held)
    for part, nbytes in passing.items():
        found[part] = found.get(part, 0.0) + nbytes
    found["allocator"] = SLACK * sum(passing.values()) if "process" not in held else 0.0
    return {part: nbytes for part, nbytes in found.items() if nbytes}


def communicators(layout: Layout) -> int:
    """Groups of ranks that talk over NCCL: the world, and each axis that is split."""
    experts = (layout.ep > 1) + (layout.ep > 1 and layout.dp > 1)
    return (layout.world > 1) + sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp)) + experts


def staging(model: Model) -> float:
    """A bucket that is gathered, one that is sent, and the largest tensor whole."""
    return BUCKETS + BF16 * _largest(model.shape)


@cache
def _largest(shape: ModelShape) -> int:
    return max(prod(size) for param in params(replace(shape, layers=1)) for size in param.shapes)


def engine_phases(
    engine: EngineMemory, weights: EngineWeights, sync: SyncSection, sleep: Sleep
) -> dict[str, dict[str, float]]:
    """What an engine adds to its GPU."""
    awake = {"engine: weights": engine.weights, "engine: runtime": engine.runtime, "engine: cache": engine.cache}
    whole = weights.whole + weights.split + weights.key_value
    staged = {"engine: next weights": float(whole)} if sync.staged and sync.transport != Transport.file else {}
    asleep = {"engine: asleep": engine.asleep}
    if sleep == Sleep.none:
        return {phase: awake | (staged if phase == "sync" else {}) for phase in PHASES}
    at_sync = {"engine: weights": engine.weights, "engine: runtime": engine.runtime} | staged
    return {"rollout": awake, "prox": asleep, "update": asleep, "sync": at_sync, "save": asleep}


def joined(*each: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Phases of learner and engine on one GPU."""
    return {phase: {part: n for one in each for part, n in one[phase].items()} for phase in PHASES}
