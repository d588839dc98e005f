"""How long a step's phases take on GPUs of a kind: operations over peak, bytes over links, and what is assumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2

from megatron_rl.config.correction_rules import makes_prox_pass
from megatron_rl.config.fleet import distinct_formats, max_sequences
from megatron_rl.config.schema import Config, Format, Sleep, Transport
from megatron_rl.learner.costs import Operations, operations
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Gpu
from megatron_rl.preflight.roles import Roles
from megatron_rl.runs.console import duration
from megatron_rl.workshop.planner.activations import Training
from megatron_rl.workshop.planner.engine_memory import EngineMemory, of_engine
from megatron_rl.workshop.planner.learner_memory import GRADIENT, MASTERS_AND_MOMENTS, chosen
from megatron_rl.workshop.planner.weights import BF16, EngineWeights, engine_weights, held
from megatron_rl.workshop.planner.workload import Assumptions, Workload

TERA, GIGA = 1e12, 1e9
# verl's pull request 7519 (Qwen3-8B): even at so many tokens of a step, 12 to 18 % of an update at 3.4 million
FP8_PAYS = 580_000
FP8_GAIN = 0.18  # of the time of the products, at best


@dataclass(frozen=True)
class StepTime:
    """Seconds. Phases follow one another; with `ahead`, rollouts are made while the learner works."""

    rollout: float
    prox: float
    update: float
    sync: float
    save: float
    decode_s: float  # of rollout: one token of every sequence that is decoded together
    decoded: int  # sequences that an engine decodes together
    bubble: float  # share of an update that pipeline stages wait
    talking: float  # share of an update that ranks spend in collectives
    fp8_s: float  # what an FP8 learner takes less than a BF16 one; negative: more
    ahead: bool = False

    @property
    def learner(self) -> float:
        """Its part of a step, which rollouts can be made beside."""
        return self.prox + self.update + self.save

    @property
    def in_turn(self) -> float:
        """A step whose phases follow one another."""
        return self.rollout + self.learner + self.sync

    @property
    def overlap(self) -> float:
        """What the shorter half does while the longer one goes on."""
        return min(self.rollout, self.learner) if self.ahead else 0.0

    @property
    def step(self) -> float:
        return self.in_turn - self.overlap


@dataclass(frozen=True)
class Learner:
    """What the learner's passes need: seconds of one rank."""

    model: Model
    training: Training
    gpu: Gpu
    per_node: int  # GPUs
    assumed: Assumptions

    def products(self, each: Operations, tokens: float, heads: float, passes: float, again: float) -> float:
        """`passes`: 1 forward, 3 with backward. `again`: forward passes of the layers that are repeated."""
        peak, assumed = self.gpu.tflops * TERA, self.assumed
        layers = each.dense / assumed.dense + each.experts / assumed.experts + each.attention / assumed.attention
        work = tokens * layers * (passes + again) + heads * each.head * passes / assumed.dense
        slower = (1 - assumed.halved) ** log2(self.model.layout.tp)
        return work / peak / slower / self.model.layout.world

    def collectives(self, tokens: float, passes: float) -> float:
        """Collectives of parallel layers and experts; `passes`: 1 forward, 2 with backward, 3 with layers repeated."""
        layout, shape = self.model.layout, self.model.shape
        of_rank = tokens / layout.dp / layout.cp
        layers = shape.layers / layout.pp
        row = of_rank * shape.hidden * BF16 * layers * passes
        seconds = 2 * row * 2 * (layout.tp - 1) / layout.tp / self.link(layout.tp)
        if shape.experts and layout.ep > 1:
            sent = 2 * row * chosen(self.model) / self.training.sp * (layout.ep - 1) / layout.ep
            seconds += sent / self.link(layout.ep * layout.expert_tp)
        return seconds

    def reductions(self) -> float:
        """Gradients in, parameters out, once for each update: replicas share them in FP32 and BF16."""
        layout = self.model.layout
        mine = max((held(self.model.shape, layout, stage) for stage in range(layout.pp)), key=lambda one: one.count)
        replicas = layout.dp * layout.cp
        of_experts = max(layout.tp * replicas // (layout.expert_tp * layout.ep), 1)
        moved = mine.dense * (replicas - 1) / replicas + mine.experts * (of_experts - 1) / of_experts
        return moved * (GRADIENT + BF16) / self.link(layout.tp * replicas)

    def link(self, ranks: int) -> float:
        """Bytes a second between so many neighbouring ranks."""
        inside = ranks <= self.per_node
        return (self.gpu.link_gbs if inside else self.gpu.network_gbs) * GIGA * self.assumed.link

    def bubble(self, packs: int) -> float:
        layout = self.model.layout
        return (layout.pp - 1) / (packs * layout.chunks)


@dataclass(frozen=True)
class Learning:
    """Seconds of the learner's phases."""

    prox: float
    update: float
    bubble: float
    talking: float
    fp8_s: float


def learning(config: Config, model: Model, gpu: Gpu, per_node: int, assumed: Assumptions) -> Learning:
    work = Workload.of(config.rollout, config.learner, assumed)
    training = Training.of(config.learner, host=False)
    each = operations(model, work.length)
    learner = Learner(model, training, gpu, per_node, assumed)
    again = 1.0 if training.granularity == "full" else 0.0
    tokens, heads = work.tokens, work.sequences * work.response
    bubble = learner.bubble(work.packs(config.learner, model))
    products = learner.products(each, tokens, heads, 3, again)
    talking = learner.collectives(tokens, 2 + again) + learner.reductions() * work.updates
    gain = products * FP8_GAIN * (1 - FP8_PAYS / max(tokens, 1))
    busy = products + talking - (gain if training.fp8 else 0)
    scored = learner.products(each, tokens, heads, 1, 0) + learner.collectives(tokens, 1)
    scores = makes_prox_pass(config.correction, config.loss, config.learner, config.rollout)
    return Learning(
        prox=scored * (1 + bubble) * (scores + bool(config.loss.kl_coef)),
        update=busy * (1 + bubble),
        bubble=1 - 1 / (1 + bubble),
        talking=talking / busy,
        fp8_s=gain,
    )


def step_time(
    config: Config,
    model: Model,
    gpu: Gpu,
    roles: Roles,
    engine: EngineMemory,
    weights: EngineWeights,
    assumed: Assumptions,
) -> StepTime:
    work = Workload.of(config.rollout, config.learner, assumed)
    learned = learning(config, model, gpu, roles.per_node, assumed)
    decode_s, decoded = decoding(config, model, gpu, engine, weights, work, roles, assumed)
    rollout = sampling(config, model, gpu, work, roles, decode_s, decoded, assumed) * assumed.batches
    return StepTime(
        rollout=rollout,
        prox=learned.prox,
        update=learned.update,
        sync=syncing(config, model.layout, gpu, roles, weights, assumed) / config.sync.every,
        save=saving(config, model, assumed, rollout + learned.prox + learned.update),
        decode_s=decode_s,
        decoded=decoded,
        bubble=learned.bubble,
        talking=learned.talking,
        fp8_s=learned.fp8_s,
        ahead=config.rollout.ahead > 0,
    )


def decoding(
    config: Config,
    model: Model,
    gpu: Gpu,
    engine: EngineMemory,
    weights: EngineWeights,
    work: Workload,
    roles: Roles,
    assumed: Assumptions,
) -> tuple[float, int]:
    """Seconds for one token of each sequence that an engine decodes together, and how many those are."""
    shape, tp = model.shape, roles.engine_tp
    of_engine = -(-work.sequences // roles.engines)
    fitting = max(int(engine.tokens / work.length), 1)
    count = max(min(max_sequences(config.sampler), of_engine, fitting), 1)
    met = 1 - (1 - chosen(model) / shape.experts) ** count if shape.experts else 1.0  # of the experts
    read = engine.weights - weights.experts / tp + count * (work.prompt + work.response / 2) * engine.token
    reading = read / assumed.reading + weights.experts / tp * met / assumed.reading_experts
    fp8 = config.quantization.format != Format.none and gpu.fp8_tflops
    peak = (gpu.fp8_tflops if fp8 else gpu.tflops) * TERA * assumed.sampling
    each = operations(model, work.length)
    computed = count * (each.dense + each.experts + each.head) / tp / peak
    seconds = max(reading / (gpu.memory_tbs * TERA), computed) + assumed.host_ms / 1e3
    if tp > 1:
        inside = tp <= roles.per_node
        hop, link = (assumed.hop_us, gpu.link_gbs) if inside else (assumed.far_hop_us, gpu.network_gbs)
        seconds += 2 * shape.layers * (hop / 1e6 + count * shape.hidden * BF16 / (link * GIGA))
    return seconds, count


def sampling(
    config: Config,
    model: Model,
    gpu: Gpu,
    work: Workload,
    roles: Roles,
    decode_s: float,
    decoded: int,
    assumed: Assumptions,
) -> float:
    """Prompts once for all their answers, answers as many at a time as fit, and the longest alone at the end."""
    of_engine = work.sequences / roles.engines
    each = operations(model, work.prompt)
    prompts = of_engine / config.rollout.samples_per_prompt * work.prompt
    first = prompts * each.body / roles.engine_tp / (gpu.tflops * TERA * assumed.sampling)
    tail = (config.rollout.max_response_tokens - work.response) / 2 * min(decode_s, assumed.host_ms / 1e3 * 2)
    return first + of_engine * work.response / decoded * decode_s + tail


def syncing(
    config: Config, layout: Layout, gpu: Gpu, roles: Roles, weights: EngineWeights, assumed: Assumptions
) -> float:
    """Whole tensors from the writers to every engine rank."""
    whole = weights.whole + weights.split + weights.key_value
    if config.sync.transport == Transport.file:
        return whole / (assumed.file_gbs * GIGA)
    near = config.sync.transport == Transport.ipc or roles.learner_nodes == 1
    return whole / ((gpu.link_gbs if near else gpu.network_gbs) * GIGA * assumed.link)


def saving(config: Config, model: Model, assumed: Assumptions, step_s: float) -> float:
    """Each step's share of the copies into host memory; the disk is written beside the next steps."""
    section, layout = config.checkpoint, model.layout
    mine = held(model.shape, layout, 0)
    copied = mine.count * (BF16 + MASTERS_AND_MOMENTS) / max(layout.dp, 1)
    every = section.every or (max(section.minutes * 60 / step_s, 1) if section.minutes and step_s else 0)
    return copied / (assumed.keep_gbs * GIGA) / every if every else 0.0


FASTER = 0.9  # of the rollout's time: less of a gain is not worth a word


def faster(
    config: Config, model: Model, gpu: Gpu, found: Roles, longest: int, limit: float, time: StepTime, by: Assumptions
) -> Iterator[str]:
    """`longest`: tokens of an answer with its prompt, which one engine's cache has to hold."""
    format = distinct_formats(config.sampler, config.quantization)[0]
    weights = engine_weights(model.shape, format, config.quantization.ignore)
    seconds = {}
    for tp in (size for size in (1, 2, 4, 8) if size < found.engine_tp and found.engine_tp % size == 0):
        sampler = replace(config.sampler, tensor_parallel=tp)
        engine = of_engine(model, sampler, config.quantization, format, longest, limit)
        if engine.tokens >= longest:
            many = replace(found, engines=found.engines * (found.engine_tp // tp), engine_tp=tp)
            changed = replace(config, sampler=sampler)
            seconds[tp] = step_time(changed, model, gpu, many, engine, weights, by).rollout
    best = min(seconds, key=seconds.__getitem__, default=None)
    if best is None or seconds[best] > FASTER * time.rollout:
        return
    count = found.engines * (found.engine_tp // best)
    way = (
        "only the embedded engine sleeps, and it is one" if config.sampler.sleep != Sleep.none else "--suggest has such"
    )
    yield (
        f"{count} engines of {best} on the same GPUs would take {duration(seconds[best])} for a rollout, not "
        f"{duration(time.rollout)} (sampler.fleet.replicas); {way}"
    )
