"""`megatron-rl plan --suggest`: the layouts of a recipe that fit a machine, fastest first, as overrides to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.schema import Config, LearnerSection, Offload, Sleep
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine
from megatron_rl.runs.console import duration, table
from megatron_rl.workshop.planner import candidates
from megatron_rl.workshop.planner.candidates import SPLIT, overrides, with_share
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.phases import TIGHT, largest_share
from megatron_rl.workshop.planner.plan import Plan, plan_case
from megatron_rl.workshop.planner.table import axes
from megatron_rl.workshop.planner.time import learning

SHOWN = 5
FASTEST, SMALLEST = 6, 3  # learners that are tried with every kind of sampler
LEAST_SHARE = 0.1  # of a GPU's memory, for an engine
MOST_NODES = 64


@dataclass(frozen=True)
class Suggestion:
    way: str  # how learner and engines share the GPUs
    config: Config
    plan: Plan


def suggestions(base: Case, count: int = SHOWN) -> list[Suggestion]:
    """The fastest of each way and layout; what a dry run would refuse is left out."""
    config, machine = base.config, base.machine
    if machine.gpu is None or not machine.gib:
        raise ConfigError("--suggest: for a machine with GPUs of a known kind; name one, such as --on 1x8xH100-80")
    fitting: list[Suggestion] = []
    of_ranks: dict[int, list[LearnerSection]] = {}
    for way, ranks, sampler in candidates.samplers(config, machine):
        if ranks not in of_ranks:
            of_ranks[ranks] = _best_learners(base, ranks)
        asleep = sampler["sampler"].sleep is not Sleep.none
        for candidate in of_ranks[ranks]:
            learner = replace(candidate, offload=Offload.optimizer if asleep else Offload.none)
            changed = _with_room(base, way, replace(config, learner=learner, **sampler))
            if changed is not None:
                found = plan_case(replace(base, config=changed))
                if not found.problems and found.verdict == "fits":
                    fitting.append(Suggestion(way, changed, found))
    fitting.sort(key=lambda one: one.plan.time.step if one.plan.time else 0.0)
    chosen: dict[tuple[Any, ...], Suggestion] = {}
    for one in fitting:
        if len(chosen) == count:
            break
        layout = one.plan.layout
        key = (one.way, layout.tp, layout.pp, layout.ep)
        if key not in chosen and not refused(one.config, machine):
            chosen[key] = one
    return list(chosen.values())


def _best_learners(base: Case, ranks: int) -> list[LearnerSection]:
    """The fastest learners that fit by themselves, and those that leave the most to an engine."""
    found: list[tuple[float, float, LearnerSection]] = []
    model = Model.of(base.hf_config, Layout())
    for learner in candidates.learners(base.config, model, ranks, base.machine.gpus):
        case = replace(base, config=replace(base.config, learner=learner))
        if case.limit is not None and case.heaviest.needed < case.limit * (1 - TIGHT):
            seconds = learning(case)
            found.append((seconds.prox + seconds.update, case.heaviest.needed, learner))
    fast = sorted(found, key=lambda one: one[0])[:FASTEST]
    small = sorted(found, key=lambda one: one[1])[:SMALLEST]
    return [learner for _, _, learner in fast + [one for one in small if one not in fast]]


def _with_room(base: Case, way: str, config: Config) -> Config | None:
    """An engine beside the learner gets what the learner leaves."""
    if way not in ("in turns", "side by side"):
        return config
    alone = plan_case(replace(base, config=with_share(config, SPLIT)))
    (memory,) = [one for one in alone.memory if one.kind == "learner and engine"]
    share = int(20 * (largest_share(memory, TIGHT) or 0)) / 20
    return with_share(config, min(share, SPLIT)) if share >= LEAST_SHARE else None


def refused(config: Config, machine: Machine) -> list[str]:
    """What a dry run would say against it, but for a key that is made for the run."""
    from megatron_rl.config.load import check as check_alone
    from megatron_rl.preflight.checks import check

    _, found = check_alone(config)
    try:
        check(config, [line for line in found if KEY_VARIABLE not in line], machine)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def describe(recipe: str, base: Case) -> tuple[str, bool]:
    """The best few, as lines to paste; where nothing fits, from how many GPUs on something does."""
    found = suggestions(base)
    if not found:
        return "\n".join(_nothing(base)), False
    head = ("", "learner and engines", "learner", "engines", "of the memory", "a step", "GPU-hours")
    rows = [_row(number, one) for number, one in enumerate(found, 1)]
    lines = [f"{base.config.model.path} on {base.machine}, fastest first:", "", *table(head, rows), ""]
    for number, one in enumerate(found, 1):
        words = " ".join(shlex.quote(word) for word in overrides(base.config, one.config))
        lines.append(f"{number}  megatron-rl train {recipe} {words}")
    if any(one.plan.roles.distant for one in found):
        lines += ["", f"node1, node2 ...: names of the site; {KEY_VARIABLE} holds the servers' key (docs/fleet.md)"]
    return "\n".join(lines), True


def _row(number: int, one: Suggestion) -> tuple[str, ...]:
    layout, found = one.plan.layout, one.plan
    again = ", recomputed" if one.config.learner.megatron.get("recompute_granularity") else ""
    peak = max(memory.peak / memory.limit for memory in found.memory if memory.limit)
    assert found.time is not None and found.gpu_hours is not None
    engines = f"{found.roles.engines} x TP{found.roles.engine_tp}"
    return (
        str(number), one.way, axes(layout) + again, engines, f"{peak:.0%}", duration(found.time.step),
        f"{found.gpu_hours:,.0f}",
    )  # fmt: skip


def _nothing(base: Case) -> Iterator[str]:
    larger = base.machine
    yield f"{base.config.model.path} does not fit {larger}, in any layout"
    while larger.nodes * larger.gpus < MOST_NODES * 8:
        larger = replace(larger, gpus=larger.gpus * 2) if larger.gpus < 8 else replace(larger, nodes=larger.nodes * 2)
        if found := suggestions(replace(base, machine=larger), count=1):
            yield f"it fits {larger}: {' '.join(overrides(base.config, found[0].config))}"
            return
