"""Rules of checks.py against engines that do not suit model, machine, GPUs, transport or installed
vLLM. Torch-free.
"""

from collections.abc import Iterator

from megatron_rl.config import foreign
from megatron_rl.config.bounds import did_you_mean
from megatron_rl.config.choices import Device, Format, KvCache, Offload, Router, Sleep, Transport
from megatron_rl.config.engine_rules import OWNED_ARGUMENTS
from megatron_rl.config.evaluation import longest_sequence
from megatron_rl.config.fleet import devices, replica_formats, uses_servers
from megatron_rl.config.sampling import (
    TIES,
    QuantizationSection,
    RolloutSection,
    SamplerSection,
    SyncSection,
)
from megatron_rl.config.schema import EvalSection, LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import ModelShape
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.roles import roles
from megatron_rl.processes.process import own_cores
from megatron_rl.quantization.formats import FP8_CAPABILITY, is_ignored, is_quantized

EXPERTS_PATTERN = r"re:.*\.experts\..*"  # every expert, for quantization.ignore


def experts(
    machine: Machine, shape: ModelShape, sampler: SamplerSection, quantization: QuantizationSection
) -> Iterator[str]:
    """Formats whose kernels cannot run the experts as `ignore` leaves them."""
    for format in dict.fromkeys(replica_formats(sampler, quantization)):
        yield from _experts(machine, shape, format, quantization.ignore)


def _experts(
    machine: Machine, shape: ModelShape, format: Format, ignore: list[str]
) -> Iterator[str]:
    quantized: dict[int, set[bool]] = {}  # of the expert tensors of each layer
    for param in params(shape):
        if param.expert is not None and param.layer is not None:
            found = (is_quantized(name, format, ignore) for name in param.hf)
            quantized.setdefault(param.layer, set()).update(found)
    mixed = [layer for layer, found in quantized.items() if len(found) > 1]
    if mixed:
        yield (
            f"quantization.ignore: {ignore} names some of the expert weights of layer {mixed[0]} "
            "and not others, but the engine runs all experts of a layer in one kernel; name all "
            f"of them ({EXPERTS_PATTERN!r} is every expert) or none"
        )
    elif machine.kind == Device.cpu and {True} in quantized.values():
        yield (
            f"quantization.format: {format} experts have no kernel on CPUs; add "
            f"{EXPERTS_PATTERN!r} to quantization.ignore (the experts stay in BF16, everything "
            "else is quantized), or use format none"
        )


def routed(
    machine: Machine, shape: ModelShape, learner: LearnerSection, sampler: SamplerSection
) -> Iterator[str]:
    """Replay of the engine's routing, where it has none or cannot report it."""
    if learner.router is Router.own:
        return
    if machine.kind == Device.cuda and sampler.vllm.get("enable_prefix_caching") is False:
        yield "sampler.vllm.enable_prefix_caching: false, but on GPUs learner.router: replay wants that cache; use true"
    if not shape.experts:
        yield f"learner.router: {learner.router}, but a {shape.family} model has no experts; use own"


def unwatchable(
    machine: Machine, shape: ModelShape, sampler: SamplerSection, learner: LearnerSection
) -> Iterator[str]:
    """Yield reasons why the modules of learner and engine cannot be compared."""
    if machine.kind != Device.cpu:
        yield "comparing modules is supported on CPUs only so far; leave it out on GPUs"
    if uses_servers(sampler) or len(set(sampler.formats)) > 1:
        yield "servers and engines of several formats do not show their modules; leave it out"
    if sampler.tensor_parallel > 1:
        yield f"an engine of sampler.tensor_parallel={sampler.tensor_parallel} does not show its modules; use 1"
    if sampler.vllm.get("enforce_eager") is False:
        yield "an engine that is compiled (sampler.vllm.enforce_eager: false) does not show its modules; use true"
    ranks = learner.tensor_parallel
    if shape.kv_heads % ranks:
        yield f"learner.tensor_parallel={ranks} does not divide {shape.kv_heads} key/value heads; use one that does"


def ignored(
    shape: ModelShape, sampler: SamplerSection, quantization: QuantizationSection
) -> Iterator[str]:
    """Report entries that match no layer: the layers they were meant for would be quantized
    silently.
    """
    if all(format == Format.none for format in replica_formats(sampler, quantization)):
        return
    modules = {name.rpartition(".")[0] for param in params(shape) for name in param.hf} | {
        "lm_head"
    }
    for entry in quantization.ignore:
        if entry == EXPERTS_PATTERN and not shape.experts:
            continue  # conf/cluster/cpu.yaml sets it for every model
        if not any(is_ignored(module, [entry]) for module in modules):
            hint = did_you_mean(entry, modules, "did you mean {}? ")
            yield (
                f"quantization.ignore: {entry!r} matches no layer of this model; {hint}names are written as in "
                r"checkpoints, such as model.layers.0.mlp.down_proj, patterns as re:.*\.down_proj"
            )


def arguments(sampler: SamplerSection, rollout: RolloutSection, eval: EvalSection) -> Iterator[str]:
    """sampler.vllm against the vLLM that is installed, where one is."""
    known = foreign.fields_of("vllm", ("engine/arg_utils.py",), ("EngineArgs",))
    if known is not None:
        given = sampler.vllm.keys() - OWNED_ARGUMENTS
        yield from foreign.schema_errors("sampler.vllm", "vLLM's EngineArgs", given, known)
    longest = longest_sequence(rollout, eval)
    if (given_length := sampler.vllm.get("max_model_len") or longest) < longest:
        yield f"sampler.vllm.max_model_len: {given_length}, but prompt and response take {longest} tokens; leave it out"


def cache(machine: Machine, quantization: QuantizationSection) -> Iterator[str]:
    """An FP8 cache, where no GPU here can keep one."""
    if quantization.kv_cache == KvCache.none:
        return
    value = f"quantization.kv_cache: {quantization.kv_cache}"
    if machine.kind == Device.cpu:
        yield f"{value} needs a GPU; use none"
    elif machine.capability is not None and machine.capability < FP8_CAPABILITY:
        yield f"{value} needs compute capability {FP8_CAPABILITY}, {machine.name} has {machine.capability}; use none"


def several(machine: Machine, sampler: SamplerSection) -> Iterator[str]:
    """GPUs or cores for several engines on this machine."""
    count = sampler.engines
    cores = len(own_cores()) or 1
    if count == 1 or uses_servers(sampler):
        return
    value = f"sampler.engines: {count}"
    if machine.kind != Device.cpu:
        if not devices(sampler):
            yield f"sampler.devices: null for {count} engines; name {count * sampler.tensor_parallel} GPUs"
    elif count * sampler.tensor_parallel > cores:
        each = ""
        if sampler.tensor_parallel > 1:
            each = f" of {sampler.tensor_parallel} ranks"
        yield f"{value} engines{each}, each on cores of its own, but there are {cores}; use fewer"


def sleep(
    machine: Machine, sampler: SamplerSection, sync: SyncSection, learner: LearnerSection
) -> Iterator[str]:
    """Sleeping engines, and an optimizer that is offloaded for them."""
    wanted = sampler.sleep
    if wanted == Sleep.none:
        if learner.offload != Offload.none and machine.kind != Device.cpu:
            yield (
                f"learner.offload: {learner.offload} makes room for an engine that sleeps "
                "meanwhile, and sampler.sleep is none; set sampler.sleep, or leave "
                "learner.offload out"
            )
        return
    if machine.kind == Device.cpu:
        yield f"sampler.sleep: {wanted} gives GPU memory back, and there is no GPU here; use none"
    if uses_servers(sampler):
        yield (
            f"sampler.sleep: {wanted} is for engines that share GPUs with the learner, not for servers; use none"
        )
    if wanted == Sleep.discard and sync.every > 1:
        yield (
            f"sampler.sleep: discard with sync.every={sync.every}: only a sync brings discarded "
            "weights back; use sampler.sleep=offload, or sync.every=1"
        )


def transport(
    machine: Machine,
    shape: ModelShape,
    sampler: SamplerSection,
    learner: LearnerSection,
    sync: SyncSection,
) -> Iterator[str]:
    """Transports that need engine and learner on the same GPUs, or on different ones."""
    name = sync.transport
    if name == Transport.file:
        return
    if machine.kind == Device.cpu:
        yield f"sync.transport: {name} needs GPUs; use file"
        return
    found = roles(Layout.from_config(learner), sampler, machine.gpus)
    first = found.tasks_per_node  # GPUs of the learner, from 0 on
    if name == Transport.ipc:
        if found.learner_nodes > 1:
            yield (
                "sync.transport: ipc shares memory within one machine, but the learner has "
                f"{found.learner} ranks on {machine.gpus} GPUs; use nccl with the engine "
                "on GPUs of its own, or file"
            )
        elif found.shared != found.local:
            yield (
                "sync.transport: ipc hands over memory on the same GPU, but the engine runs on "
                f"{','.join(map(str, found.local))} and the learner on 0 to {first - 1}; name GPUs of the learner in "
                "sampler.devices, or use nccl"
            )
    elif found.shared:
        count = sampler.engines * sampler.tensor_parallel
        free = ",".join(map(str, range(first, first + count)))
        yield (
            f"sync.transport: {name} needs a GPU for each of its ranks, but engine and learner "
            f"both take {','.join(map(str, found.shared))}; give the engine GPUs of its own "
            f"(sampler.devices={free!r}), or use ipc"
        )


def top_logprobs(shape: ModelShape, rollout: RolloutSection) -> Iterator[str]:
    most = rollout.top_logprobs.max
    if most > shape.vocab:
        yield f"rollout.top_logprobs.max: {most} of a vocabulary of {shape.vocab}; use at most {shape.vocab}"


def top_k_support(
    shape: ModelShape, rollout: RolloutSection, sampler: SamplerSection
) -> Iterator[str]:
    """Top-k filters against the vocabulary, and against the candidates that servers return."""
    if rollout.top_k is None:
        return
    if rollout.top_k >= shape.vocab:
        yield f"rollout.top_k: {rollout.top_k} of a vocabulary of {shape.vocab} keeps everything; lower it, or null"
    elif uses_servers(sampler) and rollout.candidates > shape.vocab:
        yield (
            f"rollout.top_k: {rollout.top_k}, but servers have to return {rollout.candidates} "
            f"candidates, more than the vocabulary of {shape.vocab} has; use at most "
            f"{shape.vocab - TIES}, or engines of the run"
        )


RULES = (
    top_k_support,
    top_logprobs,
    experts,
    routed,
    ignored,
    arguments,
    cache,
    several,
    sleep,
    transport,
)
