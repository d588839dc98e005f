"""Decision of `learner.recompute: auto`: the least that an update recomputes to fit a GPU, by the plan's own bytes.

Levels are nothing, the first layers of a stage (megatron-core's block method), every layer. Parts of layers (selective)
are none: fused attention keeps no scores that [core_attn] would free, [mlp] and [moe] repeat as many operations for each
byte as whole layers do, and whole layers come in smaller portions.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from megatron_rl.config.schema import Config, LearnerSection, Recompute
from megatron_rl.preflight.machine import Machine
from megatron_rl.workshop.planner.case import Assumptions, Case
from megatron_rl.workshop.planner.memory.engine import GIB
from megatron_rl.workshop.planner.phases import TIGHT, planned

UNEVEN = 0.1  # of a GPU's memory, more to spare with experts: the plan spreads tokens evenly over them


def for_machine(config: Config, hf_config: Mapping[str, Any], machine: Machine) -> tuple[Config, str]:
    """The configuration with what the machine's memory decides, and a line about it; no line on hosts."""
    case, said = decided(Case(config, hf_config, machine, Assumptions()))
    return case.config, said


def decided(case: Case) -> tuple[Case, str]:
    if not case.config.learner.undecided:
        return case, ""
    if case.host:
        return _with(case, 0), ""
    every = case.chunk_layers
    if case.limit is None:
        return _with(case, every), "learner.recompute=auto: full, as the GPU's memory is not known"
    levels = range(every + 1)
    # more layers never take more memory
    count = bisect_left(levels, True, key=lambda layers: _fits(_with(case, layers)))
    found = _with(case, min(count, every))
    what = {0: "none"}.get(count, f"{count} of {every} layers" if count < every else "full")
    most = max(_in_update(found))
    return found, f"learner.recompute=auto: {what}, with {most / GIB:.1f} of {case.limit / GIB:.1f} GiB in an update"


def _in_update(case: Case) -> list[float]:
    """Bytes of each kind of GPU that learns."""
    return [sum(one.phases["update"].values()) for one in planned(case) if "learner" in one.kind]


def _fits(case: Case) -> bool:
    spare = TIGHT + UNEVEN * bool(case.model.shape.experts)
    return case.limit is not None and max(_in_update(case)) <= (1 - spare) * case.limit


def _with(case: Case, layers: int) -> Case:
    learner = recomputing(case.config.learner, layers, case.chunk_layers)
    return replace(case, config=replace(case.config, learner=learner))


def recomputing(learner: LearnerSection, layers: int, every: int) -> LearnerSection:
    """The section with the first `layers` of `every` chunk's recomputed."""
    if layers == 0:
        return replace(learner, recompute=Recompute.none)
    block = {"recompute_method": "block", "recompute_num_layers": layers} if layers < every else {}
    return replace(learner, recompute=Recompute.full, megatron={**learner.megatron, **block})
