"""Whether more, smaller engines on the same GPUs would sample faster: those of one GPU exchange nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Config, Sleep
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Gpu
from megatron_rl.preflight.roles import Roles
from megatron_rl.runs.console import duration
from megatron_rl.workshop.planner.engine_memory import of_engine
from megatron_rl.workshop.planner.time import StepTime, step_time
from megatron_rl.workshop.planner.weights import engine_weights
from megatron_rl.workshop.planner.workload import Assumptions

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
