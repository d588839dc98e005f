"""Seconds of a step's phases on GPUs of a kind: operations over peak, bytes over links, and what is
assumed.
"""

from dataclasses import dataclass

from megatron_rl.apps.planner import passes
from megatron_rl.apps.planner.case import Case, keeps_prefixes
from megatron_rl.apps.planner.memory.activations import chosen
from megatron_rl.apps.planner.memory.engine import utilization
from megatron_rl.apps.planner.memory.learner import BF16, GRADIENT, held, replicas
from megatron_rl.apps.planner.passes import GIGA, TERA
from megatron_rl.config.fleet import max_sequences
from megatron_rl.config.schema import Format, Offload, Sleep, Transport
from megatron_rl.learner.modules.costs import operations
from megatron_rl.loss.prox_pass import makes_prox_pass
from megatron_rl.models.mapping import parameters

# verl's pull request 7519 (Qwen3-8B): even at so many tokens of a step, 12 to 18 % of an update at
# 3.4 million
FP8_PAYS = 580_000
FP8_GAIN = 0.18  # of the time of the products, at best
WAITING = 1.5  # of an update's bytes have to be free where it waits: engine/receiver.py


@dataclass(frozen=True)
class Learning:
    """The learner's part of `StepTime`."""

    prox: float
    update: float
    mfu: float  # of an update, as perf/update_mfu: what is computed again does not count
    bubble: float  # share of an update that pipeline stages wait
    talking: float  # share of an update that ranks spend in collectives


@dataclass(frozen=True)
class Sampling:
    """The engines' part of `StepTime`."""

    rollout: float
    decode_s: float  # of rollout: one token of every sequence that is decoded together
    decoded: int  # sequences that an engine decodes together
    tools: float  # of rollout: tools work, and engines have nothing else to do


@dataclass(frozen=True)
class StepTime(Sampling, Learning):
    """Seconds. Phases follow one another; asynchronous rollouts are made while the learner
    works.
    """

    sync: float
    save: float
    quantize: float  # of sync
    ahead: bool = False

    @property
    def learner(self) -> float:
        """The part of a step that rollouts can be made beside."""
        return self.prox + self.update + self.save

    @property
    def in_turn(self) -> float:
        """A step whose phases follow one another."""
        return self.rollout + self.learner + self.sync

    @property
    def overlap(self) -> float:
        """Seconds in which rollouts and the learner both work."""
        return self.ahead * min(self.rollout, self.learner)

    @property
    def step(self) -> float:
        return self.in_turn - self.overlap


def step_time(case: Case) -> StepTime:
    """Seconds of a step's phases; sync and save by their share of each step."""
    learned = learning(case)
    sampled = rolling_out(case)
    every = case.config.sync.every
    quantize = _quantizing(case)
    return StepTime(
        sync=(_syncing(case) + quantize) / every,
        quantize=quantize / every,
        save=_saving(case, sampled.rollout + learned.prox + learned.update),
        ahead=case.config.rollout.max_staleness > 0,
        **vars(sampled),
        **vars(learned),
    )


def learning(case: Case) -> Learning:
    """Seconds of the proximal pass and of the updates of a step."""
    config = case.config
    work = case.work
    layout = case.model.layout
    again = case.recomputed
    bubble = (layout.pp - 1) / (case.packs * layout.chunks)
    # frozen: no weights' gradients
    computing = passes.seconds(case, 3 if case.model.shape.lora is None else 2, again)
    talking = _collectives(case, 2 + again) + _reductions(case) * work.updates
    gain = computing * FP8_GAIN * (1 - FP8_PAYS / max(work.tokens, 1))
    busy = computing + talking - (gain if case.training.fp8 else 0)
    scored = passes.seconds(case, 1) + _collectives(case, 1)
    scores = makes_prox_pass(config.correction, config.loss, config.learner, config.rollout)
    update = busy * (1 + bubble) + _moving(case)
    return Learning(
        prox=scored * (1 + bubble) * (scores + bool(config.loss.kl_coef)),
        update=update,
        mfu=passes.needed(case) / update / (case.gpu.tflops * TERA),
        bubble=1 - 1 / (1 + bubble),
        talking=talking / busy,
    )


def _moving(case: Case) -> float:
    """Seconds to offload the optimizer to CPU memory and back for a colocated engine."""
    if case.config.learner.offload is not Offload.optimizer:
        return 0.0
    return 2 * case.heaviest.optimizer / (case.assumed.keep_gbs * GIGA)


def _collectives(case: Case, passes: float) -> float:
    """Collectives of parallel layers and experts; `passes`: 1 forward, 2 with backward, 3 with
    layers repeated.
    """
    layout = case.model.layout
    shape = case.model.shape
    of_rank = case.work.tokens / layout.dp / layout.cp
    row = of_rank * shape.hidden * BF16 * (shape.layers / layout.pp) * passes
    seconds = 2 * row * 2 * (layout.tp - 1) / layout.tp / _link(case, layout.tp)
    # each rank's keys and values to all others; backward, them and their gradients
    if layout.cp > 1:
        row_kv = 2 * of_rank * shape.size("kv") / layout.tp * BF16
        ring = row_kv * (layout.cp - 1) * shape.layers / layout.pp
        seconds += ring * (1 if passes == 1 else passes + 1) / _link(case, layout.tp * layout.cp)
    if shape.experts and layout.ep > 1:
        sent = 2 * row * chosen(case.model) / case.training.sp * (layout.ep - 1) / layout.ep
        seconds += sent / _link(case, layout.ep * layout.expert_tp)
    return seconds


def _reductions(case: Case) -> float:
    """Gradients in, parameters out, once for each update: replicas share them in FP32 and BF16."""
    layout = case.model.layout
    stages = [held(case.model.shape, layout, stage).trained for stage in range(layout.pp)]
    dense, experts = max(stages, key=sum)
    of_dense, of_experts = replicas(layout)
    moved = dense * (of_dense - 1) / of_dense + experts * (of_experts - 1) / of_experts
    return moved * (GRADIENT + BF16) / _link(case, layout.tp * of_dense)


def _link(case: Case, ranks: int) -> float:
    """Bytes a second between so many neighbouring ranks."""
    inside = ranks <= case.roles.per_node
    return (case.gpu.link_gbs if inside else case.gpu.network_gbs) * GIGA * case.assumed.link


def rolling_out(case: Case) -> Sampling:
    """Estimate the time of a rollout: prefill once per prompt, decode as many responses as fit,
    and the longest one alone at the end.

    In conversations the tokens that each turn adds are prefilled too, with a prefix cache. Tools
    take time only where nothing else is left to sample: at the end, and while the engine could
    decode more conversations than are open.
    """
    config = case.config
    gpu = case.gpu
    work = case.work
    assumed = case.assumed
    decode_s, decoded = _decoding(case)
    of_engine = work.sequences / case.roles.engines
    rate = gpu.tflops * TERA * assumed.sampling
    token_s = operations(case.model, work.prompt).body / case.roles.engine_tp / rate
    prefilled = work.prompt / config.rollout.samples_per_prompt
    prefilled += work.prefilled(keeps_prefixes(config.sampler))
    late = max(config.rollout.max_response_tokens * assumed.longest - work.sampled / work.turns, 0)
    tail = late / 2 * min(decode_s, assumed.host_ms / 1e3 * 2)
    # of one session
    alone = work.sampled * decode_s
    waited = (work.turns - 1) * assumed.tool_s
    rounds = work.sequences / work.open  # of open sessions, one after the other
    sampling = of_engine / decoded * alone
    tools = max(rounds * (alone + waited) - max(sampling, rounds * alone), waited)
    seconds = of_engine * prefilled * token_s + sampling + tail + tools
    return Sampling(seconds * assumed.batches, decode_s, decoded, tools * assumed.batches)


def _decoding(case: Case) -> tuple[float, int]:
    """Seconds of a token of every sequence under way in an engine, and how many those are."""
    shape = case.model.shape
    roles = case.roles
    engine = case.engine
    gpu = case.gpu
    work = case.work
    assumed = case.assumed
    tp = roles.engine_tp
    fitting = max(int(engine.tokens / work.length), 1)
    count = max(min(max_sequences(case.config.sampler), work.open_of(roles.engines), fitting), 1)
    met = 1.0  # of the experts
    if shape.experts:
        met = 1 - (1 - chosen(case.model) / shape.experts) ** count
    experts = case.weights.experts / tp
    read = engine.weights - experts + count * work.halfway * engine.token
    reading = read / assumed.reading + experts * met / assumed.reading_experts
    quantized = case.config.quantization.format != Format.none
    tflops = gpu.tflops
    if quantized and gpu.fp8_tflops:
        tflops = gpu.fp8_tflops
    each = operations(case.model, work.length)
    computed = count * (each.dense + each.experts + each.head) / tp
    computed /= tflops * TERA * assumed.sampling
    seconds = max(reading / (gpu.memory_tbs * TERA), computed) + assumed.host_ms / 1e3
    seconds += quantized * shape.layers * assumed.rounding_us / 1e6
    if tp > 1:
        inside = tp <= roles.per_node
        hop = assumed.hop_us if inside else assumed.far_hop_us
        link = gpu.link_gbs if inside else gpu.network_gbs
        seconds += 2 * shape.layers * (hop / 1e6 + count * shape.hidden * BF16 / (link * GIGA))
    return seconds, count


def _syncing(case: Case) -> float:
    """Whole tensors from the writers; through files, each engine rank reads what it loads. Loading
    included.
    """
    transport = case.config.sync.transport
    gpu = case.gpu
    if transport == Transport.file:
        largest = max(case.weights.nbytes / case.model.layout.pp, case.engine.weights)
        moving = largest / (case.assumed.file_gbs * GIGA)
    else:
        near = transport == Transport.ipc or case.roles.learner_nodes == 1
        link = gpu.link_gbs if near else gpu.network_gbs
        moving = case.weights.nbytes / (link * GIGA * case.assumed.link)
    return moving + _pausing(case)


def _pausing(case: Case) -> float:
    """From a GPU's own memory, where an update was checked; from the host's, where that had no room
    for it.
    """
    config = case.config
    weights = case.engine.weights
    awake = config.sync.transport == Transport.file and config.sampler.sleep == Sleep.none
    spare = (1 - utilization(config.sampler)) * (case.limit or 0.0)
    if awake and spare < WAITING * weights:
        return weights / (case.assumed.host_gbs * GIGA)
    return case.assumed.loading * weights / (case.gpu.memory_tbs * TERA)


def _quantizing(case: Case) -> float:
    """On the learner's shards, before they move."""
    if case.config.quantization.format == Format.none:
        return 0.0
    weights = parameters(case.model.shape) * BF16 / case.model.layout.world
    return weights / (case.gpu.memory_tbs * TERA * case.assumed.quantizing)


def _saving(case: Case, step_s: float) -> float:
    """Each step's share of the copies into CPU memory; the disk is written beside the next
    steps.
    """
    section = case.config.checkpoint
    if not (section.steps or section.minutes):
        return 0.0
    every = section.steps or max(section.minutes * 60 / step_s, 1)
    # of a rank, the first of replicas: its weights, and its part of their optimizer
    trained = sum(held(case.model.shape, case.model.layout, 0).trained)
    copied = case.training.width * trained + case.heaviest.optimizer
    return copied / (case.assumed.keep_gbs * GIGA) / every
