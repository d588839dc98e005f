"""Memory of each kind of GPU at each moment of a run, by use; the largest share for an engine, and
the least recomputation with which an update fits (`learner.recompute: auto`).

Where an engine sleeps (`sampler.sleep`) it starts alone, and sleeps before the learner is built. It
is awake from one sync to the end of the next rollout: probe, evaluation and save included.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import floor, prod

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.memory.engine import COMMUNICATOR, CONTEXT, GIB
from megatron_rl.apps.planner.memory.learner import BF16
from megatron_rl.config.schema import Config, Offload, Recompute, Sleep, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import HfConfig, ModelShape
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.roles import RANK_GIB

PHASES = ("rollout", "prox", "update", "sync", "save")  # of a step, that take time
MOMENTS = ("start", "rollout", "prox", "update", "sync", "probe", "save")
CACHE = "engine: cache"
# what gpu_memory_utilization is a share for
SHARE = (
    "engine: weights",
    "engine: runtime",
    CACHE,
    "engine: unused",
)
TIGHT = 0.05  # of it: a smaller margin is called tight
# of a GPU's memory, to spare with experts beyond TIGHT: the plan spreads tokens evenly over them
UNEVEN = 0.1
SLACK = 0.06  # of what comes and goes: what torch's allocator holds and cannot use
BUCKETS = 2 * (64 << 20)  # one that is gathered, one that is sent: weight_sync/buckets.py


@dataclass(frozen=True)
class Memory:
    """Memory of one kind of GPU: part -> bytes, for each phase."""

    kind: str
    gpus: int
    phases: Mapping[str, Mapping[str, float]]
    limit: float | None  # bytes that a GPU has; None: not known
    what: str = "a GPU of"

    @property
    def peak_phase(self) -> str:
        return max(
            self.phases, key=lambda phase: (sum(self.phases[phase].values()), phase != "start")
        )

    @property
    def peak(self) -> float:
        return sum(self.at_peak.values())

    @property
    def at_peak(self) -> Mapping[str, float]:
        return self.phases[self.peak_phase]

    @property
    def margin(self) -> float | None:
        if self.limit is None:
            return None
        return self.limit - self.peak

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "not known"
        if self.peak > self.limit:
            return "does not fit"
        if self.peak > (1 - TIGHT) * self.limit:
            return "tight"
        return "fits"


def planned(case: Case) -> list[Memory]:
    """Return the planned memory of each kind of GPU, or of a process on a CPU-only machine."""
    learner = _of_learner(case)
    engine = _of_engine(case)
    both = {moment: {**learner[moment], **engine[moment]} for moment in MOMENTS}
    kinds = {"learner": learner, "learner and engine": both, "engine": engine}
    what = "a process of" if case.host else "a GPU of"
    return [
        Memory(kind, gpus, kinds[kind], case.limit, what) for kind, gpus in case.roles.kinds.items()
    ]


def _of_learner(case: Case) -> dict[str, dict[str, float]]:
    """Memory by phase of a GPU that works for the learner alone, or of a rank on CPUs."""
    memory = case.heaviest
    model = case.model
    runtime = {"CUDA, NCCL": CONTEXT + COMMUNICATOR * _communicators(model.layout)}
    held = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "masters, moments": memory.optimizer,
        "reference policy": memory.reference,
        **({"process": RANK_GIB * GIB} if case.host else runtime),
    }
    if memory.head + memory.of_logits >= memory.of_layer:
        update = {"activations": memory.activations + memory.head, "logits": memory.of_logits}
    else:
        update = {"activations": memory.activations, "recomputed layers": memory.of_layer}
    passing: dict[str, Mapping[str, float]] = {
        "prox": {"forward pass": memory.forward, "reference policy": memory.reference},
        "update": update,
        "sync": {"sync": BUCKETS + BF16 * _largest(model.shape)},
        "probe": {"forward pass": case.probe},
    }
    # the optimizer is elsewhere from an update to the next where it is offloaded
    aside = dict(held)
    if case.config.learner.offload is Offload.optimizer:
        del aside["gradients"], aside["masters, moments"]
    found = {}
    for moment in MOMENTS:
        stays = held if moment in ("start", "update") else aside
        found[moment] = _together(stays, passing.get(moment, {}))
    if case.config.sampler.sleep != Sleep.none:
        found["start"] = {}
    return found


def _together(held: Mapping[str, float], passing: Mapping[str, float]) -> dict[str, float]:
    """The policy that takes the reference's place for a while is kept beside it."""
    found = dict(held)
    for part, nbytes in passing.items():
        found[part] = found.get(part, 0.0) + nbytes
    found["allocator"] = SLACK * sum(passing.values()) if "process" not in held else 0.0
    return {part: nbytes for part, nbytes in found.items() if nbytes}


def _communicators(layout: Layout) -> int:
    """Groups of ranks that talk over NCCL: the world, and each axis that is split."""
    experts = (layout.ep, min(layout.ep, layout.dp))
    sizes = (layout.world, layout.tp, layout.pp, layout.cp, layout.dp, *experts)
    return sum(size > 1 for size in sizes)


@cache
def _largest(shape: ModelShape) -> int:
    """Elements of the largest tensor."""
    return max(prod(size) for param in params(replace(shape, layers=1)) for size in param.shapes)


def _of_engine(case: Case) -> dict[str, dict[str, float]]:
    """Memory that an engine adds to its GPU by phase; files wait elsewhere where there is no room
    for them.
    """
    engine = case.engine
    sync = case.config.sync
    loaded = {"engine: weights": engine.weights, "engine: runtime": engine.runtime}
    loaded |= {"engine: CUDA, NCCL": engine.context} if engine.context else {}
    awake = loaded | {CACHE: engine.cache}
    start = awake | ({"engine: unused": engine.unused} if engine.unused else {})
    staged = {}
    if sync.transport != Transport.file:
        staged = {"engine: next weights": engine.weights}
    if case.config.sampler.sleep == Sleep.none:
        return dict.fromkeys(MOMENTS, awake) | {"start": start, "sync": awake | staged}
    asleep = {"engine: asleep": engine.asleep}
    learning = {"prox": asleep, "update": asleep, "sync": loaded | staged}
    return dict.fromkeys(MOMENTS, awake) | {"start": start} | learning


def largest_share(memory: Memory, spare: float = 0.0) -> float | None:
    """The largest sampler.vllm.gpu_memory_utilization, in hundredths, that leaves every moment
    room.

    `spare`: of the GPU's memory, to be left over. None: no cache that grows with it, or the memory
    is not known. A moment without the cache is the same with every value.
    """
    moments = [parts for parts in memory.phases.values() if CACHE in parts]
    if memory.limit is None or not moments:
        return None
    beside = max(
        sum(nbytes for part, nbytes in parts.items() if part not in SHARE) for parts in moments
    )
    return floor((1 - spare - beside / memory.limit) * 100) / 100


def for_machine(config: Config, hf_config: HfConfig, machine: Machine) -> tuple[Config, str]:
    """Return the decided configuration, and a line about the decision; "" where there is none."""
    case, said = decided(Case(config, hf_config, machine))
    return case.config, said


def decided(case: Case) -> tuple[Case, str]:
    """Return the case with `auto` replaced, and a line about it.

    Levels are nothing, the first layers of a stage (megatron-core's block method), every layer.
    Parts of layers (selective) are no level: fused attention keeps no scores that [core_attn] would
    free; [mlp] and [moe] repeat as many operations for each byte as whole layers do.
    """
    if not case.config.learner.undecided:
        return case, ""
    if case.host:
        return _with(case, 0), ""
    every = case.chunk_layers
    if case.limit is None:
        return _with(case, every), "learner.recompute=auto: full, as the GPU's memory is not known"
    # with each layer more an update takes less memory
    fits = bisect_left(range(every), True, key=lambda layers: _fits(_with(case, layers)))
    found = _with(case, fits)
    what = "none" if fits == 0 else "full" if fits == every else f"{fits} of {every} layers"
    memory = f"{_in_update(found) / GIB:.1f} of {case.limit / GIB:.1f} GiB in an update"
    return found, f"learner.recompute=auto: {what}, with {memory}"


def _in_update(case: Case) -> float:
    """Bytes of the learner's fullest kind of GPU."""
    learning = [one for one in planned(case) if "learner" in one.kind]
    return max(sum(one.phases["update"].values()) for one in learning)


def _fits(case: Case) -> bool:
    spare = TIGHT + (UNEVEN if case.model.shape.experts else 0.0)
    return case.limit is not None and _in_update(case) <= (1 - spare) * case.limit


def _with(case: Case, layers: int) -> Case:
    """The case with so many layers of each chunk recomputed."""
    learner = case.config.learner
    if layers == 0:
        learner = replace(learner, recompute=Recompute.none)
    elif layers == case.chunk_layers:
        learner = replace(learner, recompute=Recompute.full)
    else:
        block = {"recompute_method": "block", "recompute_num_layers": layers}
        megatron = {**learner.megatron, **block}
        learner = replace(learner, recompute=Recompute.full, megatron=megatron)
    return replace(case, config=replace(case.config, learner=learner))
