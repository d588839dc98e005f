"""The plan of a recipe on a machine: who runs where, memory by phase, the cache, time, and every reason against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.config.evaluation import longest_answer
from megatron_rl.config.fleet import distinct_formats, max_sequences
from megatron_rl.config.schema import Config, Device, Format, Sleep, Transport
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import parameters
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.notes import PARAMETER
from megatron_rl.preflight.roles import WORKER_GIB, Roles, roles
from megatron_rl.workshop.planner import learner_memory, phases
from megatron_rl.workshop.planner.activations import Pack
from megatron_rl.workshop.planner.engine_memory import GIB, EngineMemory, of_engine, utilization
from megatron_rl.workshop.planner.learner_memory import LearnerMemory
from megatron_rl.workshop.planner.phases import CACHE, Memory, engine_phases, joined, largest_share, learner_phases
from megatron_rl.workshop.planner.time import StepTime, faster, step_time
from megatron_rl.workshop.planner.weights import engine_weights
from megatron_rl.workshop.planner.workload import Assumptions, Workload, probe_pack

SHARE_KEY = "sampler.vllm.gpu_memory_utilization"


@dataclass(frozen=True)
class Cache:
    """The KV cache of one engine."""

    tokens: int
    at_limits: int  # sequences, all at their longest
    at_mean: int
    wanted: int  # sampler.vllm.max_num_seqs


@dataclass(frozen=True)
class Plan:
    parameters: int
    machine: Machine
    layout: Layout
    roles: Roles
    memory: tuple[Memory, ...]
    cache: Cache
    work: Workload
    packs: int  # micro-batches of an update, of one replica
    time: StepTime | None  # None: the kind of GPU is not known
    gpu_hours: float | None
    kept_gib: float  # a checkpoint
    host: Mapping[str, float]  # bytes of the first node's own memory, by part; empty where it has no GPU
    assumed: Assumptions
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what costs, and is allowed

    @property
    def verdict(self) -> str:
        order = ("does not fit", "tight", "fits", "not known")
        return min((one.verdict for one in self.memory), key=order.index)


def plan(config: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions | None = None) -> Plan:
    assumed = assumed or Assumptions()
    model = Model.of(hf_config, Layout.from_config(config.learner), config.model.head_precision)
    found = roles(model.layout, config.sampler, machine.gpus)
    work = Workload.of(config.rollout, config.learner, assumed)
    host = machine.kind == Device.cpu
    limit = machine.gib * GIB * phases.USABLE if machine.gib else None
    format = distinct_formats(config.sampler, config.quantization)[0]
    engine = of_engine(model, config.sampler, config.quantization, format, longest(config), limit, host)
    memory = _memory(config, model, machine, found, work, engine, format, limit)
    problems = [*_too_much(memory, _shares(config, engine, memory, work)), *_too_little(engine, work, limit)]
    time = None
    if machine.gpu is not None:
        weights = engine_weights(model.shape, format, config.quantization.ignore)
        time = step_time(config, model, machine.gpu, found, engine, weights, assumed)
    notes = list(_notes(found, model, machine, engine, work, config, memory))
    if machine.gpu is not None and time is not None and limit:
        notes += faster(config, model, machine.gpu, found, longest(config), limit, time, assumed)
    count = parameters(model.shape)
    kept = PARAMETER[config.learner.precision] * count
    return Plan(
        parameters=count,
        machine=machine,
        layout=model.layout,
        roles=found,
        memory=tuple(memory),
        cache=_cache(config, engine, work),
        work=work,
        packs=work.packs(config.learner, model),
        time=time,
        gpu_hours=time.step * config.run.steps * found.gpus / 3600 if time else None,
        kept_gib=kept / GIB,
        host={} if host else of_first_node(config, found, engine, work, kept),
        assumed=assumed,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def share_problems(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> list[str]:
    """What is wrong with sampler.vllm.gpu_memory_utilization where GPUs are shared, before a sync finds it out."""
    if not machine.gib or not roles(Layout.from_config(config.learner), config.sampler, machine.gpus).shared:
        return []
    made = plan(config, hf_config, machine)
    return [line for line in made.problems if line.startswith(SHARE_KEY)]


def longest(config: Config) -> int:
    """Tokens that an engine makes room for."""
    return config.rollout.max_prompt_tokens + longest_answer(config.rollout, config.eval)


def _memory(
    config: Config,
    model: Model,
    machine: Machine,
    roles: Roles,
    work: Workload,
    engine: EngineMemory,
    format: Format,
    limit: float | None,
) -> list[Memory]:
    host = machine.kind == Device.cpu
    probe = max(
        one.forward for one in _stages(config, model, probe_pack(config.rollout, config.learner, model), 1, host)
    )
    waits = config.sampler.sleep != Sleep.none
    of_learner = learner_phases(heaviest(config, model, work, host), model, probe, host, waits)
    weights = engine_weights(model.shape, format, config.quantization.ignore)
    of_engine = engine_phases(engine, weights, config.sync, config.sampler.sleep)
    kinds = {"learner": of_learner, "learner and engine": joined(of_learner, of_engine), "engine": of_engine}
    what = "a process of" if host else "a GPU of"
    return [Memory(kind, gpus, kinds[kind], limit, what) for kind, gpus in roles.kinds.items()]


def heaviest(config: Config, model: Model, work: Workload, host: bool) -> LearnerMemory:
    """The pipeline stage that needs the most."""
    packs = work.packs(config.learner, model)
    of_stages = _stages(config, model, work.worst_pack(config.learner, model), packs, host)
    return max(of_stages, key=lambda one: one.static + max(one.dynamic, one.forward))


def _stages(config: Config, model: Model, pack: Pack, packs: int, host: bool) -> list[LearnerMemory]:
    given = {"host": host, "reference": bool(config.loss.kl_coef)}
    return learner_memory.stages(model, config.learner, pack, packs, **given)


def _cache(config: Config, engine: EngineMemory, work: Workload) -> Cache:
    tokens = engine.tokens
    return Cache(tokens, int(tokens / work.longest), int(tokens / work.length), max_sequences(config.sampler))


def _shares(config: Config, engine: EngineMemory, memory: Sequence[Memory], work: Workload) -> dict[str, str]:
    """What is wrong with the engine's share of each kind of GPU, where another value would do."""
    found = {}
    given, least = config.sampler.vllm, engine.weights + engine.runtime + work.longest * engine.token
    for one in memory:
        largest = largest_share(one)
        if largest is None or one.limit is None or CACHE not in one.phases[one.peak_phase] or one.peak <= one.limit:
            continue
        if given.get("kv_cache_memory_bytes") is None and largest * one.limit >= least:
            beside = sum(n for part, n in one.phases[one.peak_phase].items() if not part.startswith("engine: "))
            keeps = f"the learner keeps {beside / GIB:.1f}" if beside else "the rest is the engine's own, too"
            found[one.kind] = (
                f"{SHARE_KEY}: {given.get('gpu_memory_utilization') or 'null'}, so that an engine takes "
                f"{utilization(config.sampler):.0%} of {one.limit / GIB:.1f} GiB and {engine.context / GIB:.1f} beside "
                f"it, but in {one.peak_phase} {keeps}; the largest that fits is {largest:.2f}"
            )
    return found


def _too_much(memory: Sequence[Memory], shares: Mapping[str, str]) -> Iterator[str]:
    for one in memory:
        if one.kind in shares:
            yield shares[one.kind]
        elif one.margin is not None and one.margin < 0 and one.limit is not None:
            parts = sorted(one.phases[one.peak_phase].items(), key=lambda part: -part[1])[:3]
            most = ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in parts)
            yield (
                f"memory: a GPU of {one.kind} needs {one.peak / GIB:.1f} GiB in {one.peak_phase}, and has "
                f"{one.limit / GIB:.1f}; the most of it: {most} GiB. `megatron-rl plan --suggest` looks for layouts "
                "that fit"
            )


def _notes(
    roles: Roles,
    model: Model,
    machine: Machine,
    engine: EngineMemory,
    work: Workload,
    config: Config,
    memory: Sequence[Memory],
) -> Iterator[str]:
    idle = machine.gpus * machine.nodes - roles.gpus
    if machine.gpus and idle > 0:
        yield f"{idle} of {machine.gpus * machine.nodes} GPUs have nothing to do"
    if machine.gpus and model.layout.tp > machine.gpus:
        yield f"learner.tensor_parallel={model.layout.tp} is more than the {machine.gpus} GPUs of a node: slow links"
    wanted = min(max_sequences(config.sampler), -(-work.sequences // roles.engines))
    if machine.gib and engine.tokens / work.length < wanted / 2:
        yield f"the cache holds {int(engine.tokens / work.length)} of {wanted} sequences at the mean: the others wait"
    yield from (
        f"{one.kind}: tight, a longer answer or another library may be too much"
        for one in memory
        if one.verdict == "tight"
    )


def _too_little(engine: EngineMemory, work: Workload, limit: float | None) -> list[str]:
    if limit is None or engine.tokens >= work.longest:
        return []
    return [
        f"{SHARE_KEY}: {engine.tokens:,} tokens of cache are left beside "
        f"{engine.weights / GIB:.1f} GiB of weights, and one prompt with its answer takes {work.longest:,}; raise "
        "it, or sampler.tensor_parallel"
    ]


PROCESS = 5 * GIB  # of one that uses a GPU: libraries, CUDA's own, what loading leaves. An assumption
VERSIONS = 2  # of the weights in shared memory: the one that is served, and the next


def pinned(nbytes: float) -> int:
    """What torch takes for a buffer that GPUs copy into: the next power of two."""
    return 1 << (max(int(nbytes), 1) - 1).bit_length()


def of_first_node(config: Config, roles: Roles, engine: EngineMemory, work: Workload, kept: float) -> dict[str, float]:
    """Bytes of the first node's memory, by use. `kept`: a checkpoint's; each rank copies its share before writing."""
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
