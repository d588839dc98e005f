"""Plan of a recipe on a machine: who runs where, memory by phase, the cache, time, and every reason
against it; and the check of an engine's share of a GPU beside the learner, which `megatron-rl
train` makes before a run.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.apps.planner.case import Case, keeps_prefixes
from megatron_rl.apps.planner.memory.engine import GIB, utilization
from megatron_rl.apps.planner.phases import CACHE, Memory, decided, largest_share, planned
from megatron_rl.apps.planner.time import StepTime, step_time
from megatron_rl.config.fleet import max_sequences
from megatron_rl.config.schema import Config, Offload, Router, Sleep, Transport
from megatron_rl.learner.modules.limits import choices_bytes
from megatron_rl.models.mapping import parameters, trained
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.notes import PARAMETER
from megatron_rl.preflight.roles import WORKER_GIB

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
    """Result of `plan`: what a case needs, and every reason against it."""

    case: Case  # with every `auto` decided
    parameters: int
    memory: tuple[Memory, ...]
    cache: Cache
    time: StepTime | None  # None: the kind of GPU is not known
    gpu_hours: float | None
    kept_gib: float  # a checkpoint
    # bytes of the first node's own memory, by part; empty where it has no GPU
    host: Mapping[str, float]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # what costs, and is allowed

    @property
    def verdict(self) -> str:
        order = ("does not fit", "tight", "fits", "not known")
        return min((one.verdict for one in self.memory), key=order.index)


def plan(case: Case) -> Plan:
    """Plan a case, with every `auto` of its recipe decided first."""
    case, said = decided(case)
    config = case.config
    machine = case.machine
    work = case.work
    memory = planned(case)
    time = step_time(case) if machine.gpu is not None else None
    kept = PARAMETER[config.learner.precision] * trained(case.model.shape)
    host = {} if case.host else of_first_node(case, kept)
    tokens = case.engine.tokens
    return Plan(
        case=case,
        parameters=parameters(case.model.shape),
        memory=tuple(memory),
        cache=Cache(
            tokens=tokens,
            at_limits=int(tokens / work.longest),
            at_mean=int(tokens / work.length),
            wanted=max_sequences(config.sampler),
        ),
        time=time,
        gpu_hours=time.step * config.run.steps * case.roles.gpus / 3600 if time else None,
        kept_gib=kept / GIB,
        host=host,
        problems=(*_too_much(case, memory), *_too_little(case), *_too_much_of_host(machine, host)),
        notes=(*filter(None, [said]), *_notes(case, memory)),
    )


def share_problems(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> list[str]:
    """Return problems of sampler.vllm.gpu_memory_utilization on shared GPUs, before any sync."""
    case = Case(config, hf_config, machine)
    if not machine.gib or not case.roles.shared:
        return []
    return [line for line in plan(case).problems if line.startswith(SHARE_KEY)]


def _share(case: Case, one: Memory) -> str | None:
    """Describe the engine's memory share of a kind of GPU if another value would fit."""
    given = case.config.sampler.vllm
    engine = case.engine
    largest = largest_share(one)
    if largest is None or one.limit is None or CACHE not in one.at_peak or one.peak <= one.limit:
        return None
    least = engine.weights + engine.runtime + case.work.longest * engine.token
    if given.get("kv_cache_memory_bytes") is not None or largest * one.limit < least:
        return None
    keeps = "the rest is the engine's own, too"
    if beside := sum(n for part, n in one.at_peak.items() if not part.startswith("engine: ")):
        keeps = f"the learner keeps {beside / GIB:.1f}"
    return (
        f"{SHARE_KEY}: {given.get('gpu_memory_utilization') or 'null'}, so that an engine takes "
        f"{utilization(case.config.sampler):.0%} of {one.limit / GIB:.1f} GiB and "
        f"{engine.context / GIB:.1f} beside it, but in {one.peak_phase} {keeps}; the largest that "
        f"fits is {largest:.2f}"
    )


def _too_much(case: Case, memory: Sequence[Memory]) -> Iterator[str]:
    """Kinds of GPUs whose memory the fullest phase exceeds."""
    for one in memory:
        if share := _share(case, one):
            yield share
        elif one.limit is not None and one.peak > one.limit:
            shares = ""
            if "learner" in one.kind:
                shares = "learner.context_parallel shares long responses; "
            yield (
                f"memory: a GPU of {one.kind} needs {one.peak / GIB:.1f} GiB in {one.peak_phase}, "
                f"and has {one.limit / GIB:.1f}; the most of it: {largest_parts(one.at_peak)} GiB. {shares}"
                "`megatron-rl plan --suggest` looks for layouts that fit"
            )


def largest_parts(parts: Mapping[str, float]) -> str:
    """The three largest parts, in GiB."""
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    return ", ".join(f"{name} {nbytes / GIB:.1f}" for name, nbytes in largest)


def _too_little(case: Case) -> Iterator[str]:
    """A cache that cannot hold one prompt with its response."""
    engine = case.engine
    longest = case.work.longest
    if case.limit is not None and engine.tokens < longest:
        yield (
            f"{SHARE_KEY}: {engine.tokens:,} tokens of cache are left beside "
            f"{engine.weights / GIB:.1f} GiB of weights, and one prompt with its response takes "
            f"{longest:,}; raise it, or sampler.tensor_parallel"
        )


def _notes(case: Case, memory: Sequence[Memory]) -> Iterator[str]:
    """Settings that cost time or GPUs, and are allowed."""
    machine = case.machine
    engine = case.engine
    work = case.work
    tp = case.model.layout.tp
    gpus = machine.gpus * machine.nodes
    if machine.gpus and gpus > case.roles.gpus:
        yield f"{gpus - case.roles.gpus} of {gpus} GPUs have nothing to do"
    if machine.gpus and tp > machine.gpus:
        yield f"learner.tensor_parallel={tp} is more than the {machine.gpus} GPUs of a node: slow links"
    wanted = min(max_sequences(case.config.sampler), -(-work.sequences // case.roles.engines))
    if machine.gib and engine.tokens / work.length < wanted / 2:
        yield f"the cache holds {int(engine.tokens / work.length)} of {wanted} sequences at the mean: the others wait"
    held = int(work.open_of(case.roles.engines) * work.halfway)
    if (
        machine.gib
        and work.sessions
        and keeps_prefixes(case.config.sampler)
        and engine.tokens < held
    ):
        fitting = max(int(engine.tokens / work.halfway), 1) * case.roles.engines
        yield (
            f"open sessions come to {held:,} tokens of an engine's {engine.tokens:,}: prefixes are "
            f"lost while tools work, and prefilled again; environment.max_concurrent={fitting} fits"
        )
    tight = "tight, a longer response or another library may be too much"
    yield from (f"{one.kind}: {tight}" for one in memory if one.verdict == "tight")


def _too_much_of_host(machine: Machine, host: Mapping[str, float]) -> Iterator[str]:
    """CPU memory of the first node, where the machine names it."""
    needed = sum(host.values()) / GIB
    if machine.host_gib and needed > machine.host_gib:
        yield (
            f"CPU memory: the first node needs {needed:.0f} GiB of its own, has "
            f"{machine.host_gib:.0f}; the most of it: {largest_parts(host)} GiB. Use more nodes, or leave "
            "learner.offload at none"
        )


# of one that uses a GPU: libraries, CUDA's own, what loading leaves. An assumption
PROCESS = 5 * GIB
VERSIONS = 2  # of the weights in shared memory: the one that is served, and the next


def pinned(nbytes: float) -> int:
    """Return the size that torch allocates for a pinned buffer: the next power of two."""
    return 1 << (max(int(nbytes), 1) - 1).bit_length()


def of_first_node(case: Case, kept: float) -> dict[str, float]:
    """Bytes of the first node's memory, by use. `kept`: a checkpoint's; each rank copies its share
    before writing.
    """
    config = case.config
    roles = case.roles
    engine = case.engine
    ranks = roles.tasks_per_node
    engines = len(roles.local)
    shared = config.sync.transport == Transport.file and config.sync.dir is None
    found = {
        "checkpoint, pinned": ranks * pinned(kept / roles.learner),
        "optimizer, pinned": ranks
        * case.heaviest.optimizer
        * (config.learner.offload is Offload.optimizer),
        "processes": (ranks + engines + 1) * PROCESS + config.reward.workers * WORKER_GIB * GIB,
        "sync, in shared memory": VERSIONS * engine.weights * roles.engine_tp * shared,
        "the sleeping engine's weights": engines
        * engine.weights
        * (config.sampler.sleep == Sleep.offload),
        # two copies on the driver (responses and batch), and each rank's rows of its layers
        "routed experts": (
            2 + ranks / config.learner.data_parallel / config.learner.pipeline_parallel
        )
        * (case.work.sequences * case.work.longest)
        * choices_bytes(case.model.shape, case.hf_config)
        * (config.learner.router is Router.replay),
        # two copies on the driver, and each rank's rows
        "top logprobs": (2 + ranks / config.learner.data_parallel) * case.work.top_logprobs,
        "batches that wait": case.work.waiting_bytes(config.rollout.max_staleness),
    }
    return {part: nbytes for part, nbytes in found.items() if nbytes}
