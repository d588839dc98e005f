"""`megatron-rl plan --suggest`: the layouts that fit a machine, fastest first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.schema import Config, LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.runs.console import duration, table
from megatron_rl.workshop.planner import candidates
from megatron_rl.workshop.planner.candidates import SPLIT, Candidate, with_share
from megatron_rl.workshop.planner.engine_memory import GIB
from megatron_rl.workshop.planner.phases import TIGHT, USABLE, largest_share
from megatron_rl.workshop.planner.plan import Plan, heaviest, plan
from megatron_rl.workshop.planner.time import learning
from megatron_rl.workshop.planner.workload import Assumptions, Workload

SHOWN = 5
FASTEST, SMALLEST = 6, 3  # learners that are tried with every kind of sampler
LEAST_SHARE = 0.1  # of a GPU's memory, for an engine
MOST_NODES = 64


@dataclass(frozen=True)
class Suggestion:
    candidate: Candidate
    plan: Plan


def suggestions(
    config: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions, count: int = SHOWN
) -> list[Suggestion]:
    """The fastest of each way and layout; what a dry run would refuse is left out."""
    if machine.gpu is None or not machine.gib:
        raise ConfigError("--suggest: for a machine with GPUs of a known kind; name one, such as --on 1x8xH100-80")
    fitting: list[Suggestion] = []
    of_ranks: dict[int, list[LearnerSection]] = {}
    for way, ranks, sampler in candidates.samplers(config, machine):
        if ranks not in of_ranks:
            of_ranks[ranks] = _best_learners(config, hf_config, machine, assumed, ranks)
        for learner in of_ranks[ranks]:
            made = candidates.candidate(config, way, learner, sampler)
            room = _with_room(made, config, hf_config, machine, assumed)
            if room is None:
                continue
            found = plan(room.config, hf_config, machine, assumed)
            if not found.problems and found.verdict == "fits":
                fitting.append(Suggestion(room, found))
    fitting.sort(key=lambda one: one.plan.time.step if one.plan.time else 0.0)
    chosen: dict[tuple[Any, ...], Suggestion] = {}
    for one in fitting:
        if len(chosen) == count:
            break
        layout = one.plan.layout
        key = (one.candidate.way, layout.tp, layout.pp, layout.ep)
        if key not in chosen and not refused(one.candidate.config, machine):
            chosen[key] = one
    return list(chosen.values())


def _best_learners(
    config: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions, ranks: int
) -> list[LearnerSection]:
    """The fastest learners that fit by themselves, and those that leave the most to an engine."""
    assert machine.gpu is not None
    limit, found = machine.gib * GIB * USABLE * (1 - TIGHT), []
    work = Workload.of(config.rollout, config.learner, assumed)
    for learner in candidates.learners(config, Model.of(hf_config, Layout()), ranks, machine.gpus):
        changed = replace(config, learner=learner)
        model = Model.of(hf_config, Layout.from_config(learner), config.model.head_precision)
        memory = heaviest(changed, model, work, host=False)
        needed = memory.static + max(memory.dynamic, memory.forward)
        if needed < limit:
            seconds = learning(changed, model, machine.gpu, machine.gpus, assumed)
            found.append((seconds.prox + seconds.update, needed, learner))
    fast = sorted(found, key=lambda one: one[0])[:FASTEST]
    small = sorted(found, key=lambda one: one[1])[:SMALLEST]
    return [learner for _, _, learner in fast + [one for one in small if one not in fast]]


def _with_room(
    candidate: Candidate, base: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions
) -> Candidate | None:
    """An engine beside the learner gets what the learner leaves."""
    if candidate.way not in ("in turns", "side by side"):
        return candidate
    alone = plan(with_share(candidate, base, SPLIT).config, hf_config, machine, assumed)
    (memory,) = [one for one in alone.memory if one.kind == "learner and engine"]
    share = int(20 * (largest_share(memory, TIGHT) or 0)) / 20
    return with_share(candidate, base, min(share, SPLIT)) if share >= LEAST_SHARE else None


def refused(config: Config, machine: Machine) -> list[str]:
    """What a dry run would say against it, but for a key that is made for the run."""
    from megatron_rl.config.rules import check as check_alone
    from megatron_rl.preflight.checks import check

    _, found = check_alone(config)
    try:
        check(config, [line for line in found if KEY_VARIABLE not in line], machine)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def describe(
    recipe: str, config: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions
) -> tuple[str, bool]:
    """The best few, as lines to paste; where nothing fits, from how many GPUs on something does."""
    found = suggestions(config, hf_config, machine, assumed)
    if not found:
        return "\n".join(_nothing(config, hf_config, machine, assumed)), False
    head = ("", "learner and engines", "learner", "engines", "of the memory", "a step", "GPU-hours")
    rows = [_row(number, one) for number, one in enumerate(found, 1)]
    lines = [f"{config.model.path} on {machine}, fastest first:", "", *table(head, rows), ""]
    for number, one in enumerate(found, 1):
        words = " ".join(shlex.quote(word) for word in one.candidate.overrides)
        lines.append(f"{number}  megatron-rl train {recipe} {words}")
    if any(one.plan.roles.distant for one in found):
        lines += ["", f"node1, node2 ...: names of the site; {KEY_VARIABLE} holds the servers' key (docs/fleet.md)"]
    return "\n".join(lines), True


def _row(number: int, one: Suggestion) -> tuple[str, ...]:
    layout, found = one.plan.layout, one.plan
    axes = (("TP", layout.tp), ("PP", layout.pp), ("EP", layout.ep), ("DP", layout.dp))
    sizes = " ".join(f"{name}{size}" for name, size in axes if size > 1) or "one rank"
    again = ", recomputed" if one.candidate.config.learner.megatron.get("recompute_granularity") else ""
    peak = max(memory.peak / memory.limit for memory in found.memory if memory.limit)
    assert found.time is not None and found.gpu_hours is not None
    engines = f"{found.roles.engines} x TP{found.roles.engine_tp}"
    return (
        str(number), one.candidate.way, sizes + again, engines, f"{peak:.0%}", duration(found.time.step),
        f"{found.gpu_hours:,.0f}",
    )  # fmt: skip


def _nothing(config: Config, hf_config: Mapping[str, Any], machine: Machine, assumed: Assumptions) -> Iterator[str]:
    yield f"{config.model.path} does not fit {machine}, in any layout"
    larger = machine
    while larger.nodes * larger.gpus < MOST_NODES * 8:
        larger = replace(larger, gpus=larger.gpus * 2) if larger.gpus < 8 else replace(larger, nodes=larger.nodes * 2)
        found = suggestions(config, hf_config, larger, assumed, count=1)
        if found:
            yield f"it fits {larger}: {' '.join(found[0].candidate.overrides)}"
            return
