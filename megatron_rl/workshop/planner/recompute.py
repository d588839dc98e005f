"""Decision of `learner.recompute: auto`: the least recomputation with which an update fits a GPU.

Levels are nothing, the first layers of a stage (megatron-core's block method), every layer. Parts
of layers (selective) are no level: fused attention keeps no scores that [core_attn] would free;
[mlp] and [moe] repeat as many operations for each byte as whole layers do, in larger portions.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Config, Recompute
from megatron_rl.preflight.machine import Machine
from megatron_rl.workshop.planner.case import Assumptions, Case
from megatron_rl.workshop.planner.memory.engine import GIB
from megatron_rl.workshop.planner.phases import TIGHT, planned

# of a GPU's memory, to spare with experts beyond TIGHT: the plan spreads tokens evenly over them
UNEVEN = 0.1


def for_machine(
    config: Config,
    hf_config: Mapping[str, Any],
    machine: Machine,
) -> tuple[Config, str]:
    """Return the decided configuration, and a line about the decision; "" where there is none."""
    case, said = decided(Case(config, hf_config, machine, Assumptions()))
    return case.config, said


def decided(case: Case) -> tuple[Case, str]:
    """Return the case with `auto` replaced, and a line about it."""
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
