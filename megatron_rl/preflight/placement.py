"""Where engines and ranks of the learner would run on a machine, and what does not fit there. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron_rl.config.fleet import HOST_CACHE_BYTES, distant, is_fleet
from megatron_rl.config.schema import Device, LearnerSection, SamplerSection, Sleep, SyncSection
from megatron_rl.models.layout import Layout
from megatron_rl.preflight.machine import Machine


def ranks(machine: Machine, learner: LearnerSection) -> Iterator[str]:
    """One GPU for each rank of the learner."""
    world, there = Layout.from_config(learner).world, machine.nodes * machine.gpus
    if there and world > there:
        sizes = f"tensor_parallel {learner.tensor_parallel} x pipeline_parallel {learner.pipeline_parallel}"
        yield (
            f"learner: {sizes} x data_parallel {learner.data_parallel} is {world} ranks of a GPU each, but {machine} "
            f"has {there}; lower one of them, or set run.device=cpu"
        )


def engine_gpus(machine: Machine, sampler: SamplerSection, learner: LearnerSection) -> Iterator[str]:
    """GPUs that are there, and that the learner leaves to the engines."""
    engines = gpus_of_engines(sampler)
    if machine.kind == Device.cpu or not machine.gpus or not engines:
        return
    key = "sampler.fleet.devices" if is_fleet(sampler) else "sampler.devices"
    beyond = [number for number in sorted(engines) if number >= machine.gpus]
    if beyond:
        yield (
            f"{key}: {_list(beyond)} of the engine's GPUs, but a node has 0 to {machine.gpus - 1} ({machine}); name "
            f"others, or lower sampler.tensor_parallel={sampler.tensor_parallel}"
        )
    local = min(Layout.from_config(learner).world, machine.gpus)  # ranks take the first GPUs of their host
    shared = sorted(engines & set(range(local)))
    if shared and sampler.sleep == Sleep.none and sampler.vllm.get("gpu_memory_utilization") is None:
        yield (
            f"{key}: the engine and the learner share GPU {_list(shared)}, and by itself vLLM takes nearly all "
            "memory; name other GPUs, or set sampler.vllm.gpu_memory_utilization (such as 0.3), or sampler.sleep"
        )


def gpus_of_engines(sampler: SamplerSection) -> set[int]:
    """The GPUs of every engine of this machine: what is no number is reported elsewhere."""
    fleet = sampler.fleet
    given = ",".join(fleet.devices) if is_fleet(sampler) else sampler.devices
    if given:
        return {int(device) for device in given.split(",") if device.isdecimal()}
    return set(range(sampler.tensor_parallel)) if fleet.replicas or not is_fleet(sampler) else set()


def fleet_gpus(machine: Machine, sampler: SamplerSection) -> Iterator[str]:
    """Which server runs where."""
    fleet, parallel = sampler.fleet, sampler.tensor_parallel
    if not is_fleet(sampler):
        return
    if sampler.devices is not None:
        yield (
            f"sampler.devices: {sampler.devices!r} is for the embedded engine; "
            "sampler.fleet.devices names the GPUs of each server"
        )
    if machine.kind == Device.cpu:
        if fleet.devices:
            yield f"sampler.fleet.devices: {fleet.devices}, but this run has no GPU; remove it"
        return
    if not fleet.devices and fleet.replicas > 1:
        yield (
            f"sampler.fleet.devices: empty, so that {fleet.replicas} servers would share the same GPUs; name those of "
            f'each, such as ["0", "1"]'
        )
    if not fleet.devices:
        return
    if len(fleet.devices) != fleet.replicas:
        yield (
            f"sampler.fleet.devices: {len(fleet.devices)} entries for sampler.fleet.replicas={fleet.replicas}; "
            "give one for each"
        )
    numbers = [number for entry in fleet.devices for number in entry.split(",")]
    if not all(map(str.isdecimal, numbers)) or len(set(numbers)) < len(numbers):
        yield f"sampler.fleet.devices: {fleet.devices}, expected numbers of GPUs such as '4,5', each once in the fleet"
    elif any(len(entry.split(",")) != parallel for entry in fleet.devices):
        yield (
            f"sampler.fleet.devices: {fleet.devices} for sampler.tensor_parallel={parallel}; name as many for each "
            "server"
        )


def host_memory(machine: Machine, sampler: SamplerSection) -> Iterator[str]:
    """KV caches alone: a fleet multiplies them, and hosts kill what takes too much."""
    if machine.kind != Device.cpu or not is_fleet(sampler):
        return
    each = sampler.vllm.get("kv_cache_memory_bytes", HOST_CACHE_BYTES) / (1 << 30)
    wanted = sampler.fleet.replicas * sampler.tensor_parallel * each
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    if wanted > installed:
        yield (
            f"sampler.vllm.kv_cache_memory_bytes: {each:g} GiB for each of {sampler.fleet.replicas} servers is "
            f"{wanted:g} GiB, this machine has {installed:.0f}; lower it, or sampler.fleet.replicas"
        )


def reach(sampler: SamplerSection, sync: SyncSection) -> Iterator[str]:
    elsewhere = distant(sampler)
    if elsewhere and sync.dir is None:
        yield (
            f"sync.dir: null is shared memory of this machine, which {elsewhere[0]} cannot read; name a "
            "folder on a file system that it shares"
        )


def _list(numbers: list[int]) -> str:
    return ",".join(map(str, numbers))
