"""Layouts that a recipe could have on a machine, as overrides: who gets which GPUs, and how the model is cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Config, LearnerSection, SamplerSection, Sleep, Transport
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.workshop.planner.workload import Assumptions, Workload

POWERS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LEAST_BUDGET = 8192  # tokens of a micro-batch
SPLIT = 0.9  # of the memory, for an engine that has its GPUs to itself
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
OWNED = (  # of learner.megatron: what a layout decides
    *(*FULL, "recompute_modules", "sequence_parallel", "expert_tensor_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "num_layers_in_first_pipeline_stage"),
    "num_layers_in_last_pipeline_stage",
)
SHARED_FOLDER = "/shared/sync"  # the reader's own, where engines are on other nodes


def samplers(config: Config, machine: Machine) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(way, ranks of the learner, sections of the sampler's side)."""
    gpus, total = machine.gpus, machine.gpus * machine.nodes
    for tp in (size for size in POWERS if size <= gpus):
        if config.sync.every == 1:
            near = machine.nodes == 1
            yield "in turns", total, _in_turns(config, tp, gpus, near)
        if machine.nodes == 1:
            yield "side by side", total, _servers(config, tp, range(gpus), None)
        for learner in sorted({gpus // 2, gpus // 4, 3 * gpus // 4, gpus - tp} - {0}) if machine.nodes == 1 else ():
            if gpus - learner >= tp:
                yield "apart", learner, _servers(config, tp, range(learner, gpus), SPLIT)
        for nodes in sorted({machine.nodes // 4, machine.nodes // 2, 3 * machine.nodes // 4} - {0}):
            if nodes < machine.nodes:
                yield "on nodes apart", nodes * gpus, _distant(config, tp, machine, nodes)


def _in_turns(config: Config, tp: int, gpus: int, near: bool) -> dict[str, Any]:
    """As many engines as the first node has room for, which sleep while the learner works."""
    sampler, count = _sampler(config, tp, None), gpus // tp
    sampler = replace(sampler, engines=count, devices=",".join(map(str, range(count * tp))), sleep=Sleep.discard)
    return {"sampler": sampler, "sync": replace(config.sync, transport=Transport.ipc if near else Transport.file)}


def _servers(config: Config, tp: int, gpus: range, share: float | None) -> dict[str, Any]:
    """Sections for as many engines as fit on these GPUs of the first node."""
    groups = [",".join(map(str, gpus[start : start + tp])) for start in range(0, len(gpus) - tp + 1, tp)]
    sampler = _sampler(config, tp, share)
    fleet = replace(sampler.fleet, replicas=len(groups) if len(groups) > 1 else 0)
    sampler = replace(sampler, devices=groups if len(groups) > 1 else groups[0], fleet=fleet)
    return {"sampler": sampler, "sync": replace(config.sync, transport=Transport.file)}


def _distant(config: Config, tp: int, machine: Machine, learner_nodes: int) -> dict[str, Any]:
    each = machine.gpus // tp
    hosts = range(learner_nodes, machine.nodes)
    addresses = [f"http://node{host}:{8000 + number}" for host in hosts for number in range(each)]
    sampler = _sampler(config, tp, SPLIT)
    sampler = replace(sampler, devices=None, fleet=replace(sampler.fleet, addresses=addresses))
    folder = config.sync.dir or SHARED_FOLDER
    return {"sampler": sampler, "sync": replace(config.sync, transport=Transport.file, dir=folder)}


def _sampler(config: Config, tp: int, share: float | None) -> SamplerSection:
    sampler = config.sampler
    fleet = replace(sampler.fleet, replicas=0, servers=0, addresses=[], formats=[])
    vllm = {**sampler.vllm} | ({"gpu_memory_utilization": share} if share else {})
    return replace(sampler, tensor_parallel=tp, engines=1, sleep=Sleep.none, fleet=fleet, vllm=vllm)


def learners(config: Config, model: Model, ranks: int, gpus: int) -> Iterator[LearnerSection]:
    shape, work, cp = model.shape, Workload.of(config, config.learner, Assumptions()), config.learner.context_parallel
    for tp in (size for size in POWERS if size <= gpus and _cuts(model, size)):
        for pp in (size for size in STAGES if shape.layers % size == 0 and ranks % (tp * size * cp) == 0):
            replicas = ranks // tp // pp // cp
            if replicas > max(work.sequences // work.updates, 1):
                continue
            for ep in POWERS if shape.experts else (1,):
                if shape.experts and (shape.experts % ep or tp * cp * replicas % ep):
                    continue
                for again in ({}, FULL):
                    yield _learner(config, tp, pp, replicas, ep, again, max(work.longest, LEAST_BUDGET))


def _cuts(model: Model, tp: int) -> bool:
    shape = model.shape
    heads = shape.heads % tp == 0 and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)
    return heads and (bool(shape.experts) or shape.ffn % tp == 0)


def _learner(config: Config, tp: int, pp: int, dp: int, ep: int, again: dict[str, Any], budget: int) -> LearnerSection:
    megatron = {key: value for key, value in config.learner.megatron.items() if key not in OWNED} | again
    if tp > 1 or config.learner.megatron.get("sequence_parallel"):
        megatron["sequence_parallel"] = tp > 1
    megatron |= {"expert_tensor_parallel_size": 1} if ep > 1 and tp > 1 else {}
    return replace(
        config.learner,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        expert_parallel=ep,
        tokens_per_microbatch=budget,
        megatron=megatron,
    )


def with_share(config: Config, share: float) -> Config:
    """The configuration with another part of the memory for engines."""
    sampler = config.sampler
    return replace(config, sampler=replace(sampler, vllm={**sampler.vllm, "gpu_memory_utilization": share}))


def overrides(base: Config, changed: Config) -> Iterator[str]:
    """The way from one to the other, as the command line takes it."""
    for section in ("learner", "sampler", "sync"):
        yield from _of_section(section, getattr(base, section), getattr(changed, section))


def _of_section(name: str, old: Any, new: Any) -> Iterator[str]:
    for key, value in vars(new).items():
        before = getattr(old, key)
        if value == before:
            continue
        if hasattr(value, "__dataclass_fields__"):
            yield from _of_section(f"{name}.{key}", before, value)
        elif isinstance(value, dict):
            for each in {**before, **value}:
                if value.get(each) != before.get(each):
                    yield f"{name}.{key}.{each}={_written(value.get(each))}"
        else:
            yield f"{name}.{key}={_written(value)}"


def _written(value: Any) -> str:
    if isinstance(value, list | bool) or value is None:
        return json.dumps(value, separators=(",", ":"))
    if isinstance(value, str) and value.replace(",", "").isdecimal():
        return json.dumps(value)  # GPUs: text, not a number
    return str(value)
