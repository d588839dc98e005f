"""`megatron-rl plan --suggest`: the layouts of a recipe that fit a machine, fastest first, as
overrides to paste.
"""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.phases import TIGHT, largest_share, planned
from megatron_rl.apps.planner.plan import Plan, plan
from megatron_rl.apps.planner.summary import axes
from megatron_rl.apps.planner.time import learning
from megatron_rl.config import ConfigError
from megatron_rl.config.choices import Format, Offload, Recompute, Sleep, Transport
from megatron_rl.config.fleet import KEY_VARIABLE
from megatron_rl.config.load import check, flat
from megatron_rl.config.plain_yaml import write_line
from megatron_rl.config.schema import Config, LearnerSection
from megatron_rl.models.layout import Layout
from megatron_rl.preflight import checks
from megatron_rl.preflight.machine import Machine
from megatron_rl.preflight.sizes import problems
from megatron_rl.tracking.console import duration, table

SHOWN = 5
# learners that are tried with every kind of sampler
FASTEST = 6
SMALLEST = 3
LEAST_SHARE = 0.1  # of a GPU's memory, for an engine
POWERS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
LEAST_BUDGET = 8192  # tokens of a micro-batch
SPLIT = 0.9  # of the memory, for an engine that has its GPUs to itself
OWNED = (  # of learner.megatron: what a layout decides
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("sequence_parallel", "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
)
SHARED_FOLDER = "/shared/sync"  # the reader's own, where engines are on other nodes


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits the machine."""

    way: str  # how learner and engines share the GPUs
    config: Config
    plan: Plan


def suggestions(base: Case) -> list[Suggestion]:
    """The fastest of each way and layout; what a dry run would refuse is left out."""
    config = base.config
    machine = base.machine
    if machine.gpu is None or not machine.gib:
        raise ConfigError(
            "--suggest: for a machine with GPUs of a known kind; name one, such as --on 1x8xH100-80"
        )
    fitting: list[Suggestion] = []
    of_ranks: dict[int, list[LearnerSection]] = {}
    for way, ranks, engines in _samplers(config, machine):
        if ranks not in of_ranks:
            of_ranks[ranks] = _best_learners(base, ranks)
        offload = Offload.none if engines.sampler.sleep is Sleep.none else Offload.optimizer
        for candidate in of_ranks[ranks]:
            learner = replace(candidate, offload=offload)
            changed = _with_room(base, way, replace(engines, learner=learner))
            if changed is None:
                continue
            # the engine's share is what the learner leaves; it recomputes no more than tried
            learner = replace(learner, recompute=Recompute.auto)
            changed = replace(changed, learner=learner)
            found = plan(replace(base, config=changed))
            if not found.problems and found.verdict == "fits":
                fitting.append(Suggestion(way, changed, found))
    fitting.sort(key=lambda one: one.plan.time.step if one.plan.time else 0.0)
    chosen: dict[tuple[Any, ...], Suggestion] = {}
    for one in fitting:
        if len(chosen) == SHOWN:
            break
        layout = one.plan.case.model.layout
        key = (one.way, layout.tp, layout.pp, layout.ep)
        if key not in chosen and not refused(one.config, machine):
            chosen[key] = one
    return list(chosen.values())


def _best_learners(base: Case, ranks: int) -> list[LearnerSection]:
    """The fastest learners that fit by themselves, and those that leave the most to an engine."""
    found: list[tuple[float, float, LearnerSection]] = []
    for learner in _learners(base, ranks):
        case = replace(base, config=replace(base.config, learner=learner))
        if case.limit is not None and case.heaviest.needed < case.limit * (1 - TIGHT):
            seconds = learning(case)
            found.append((seconds.prox + seconds.update, case.heaviest.needed, learner))
    fast = sorted(found, key=lambda one: one[0])[:FASTEST]
    small = sorted(found, key=lambda one: one[1])[:SMALLEST]
    return [learner for _, _, learner in fast + [one for one in small if one not in fast]]


def _with_room(base: Case, way: str, config: Config) -> Config | None:
    """An engine that takes turns with the learner gets what the learner leaves."""
    if way != "colocated":
        return config
    alone = planned(replace(base, config=config))
    (memory,) = [one for one in alone if one.kind == "learner and engine"]
    share = int(20 * (largest_share(memory, TIGHT) or 0)) / 20
    if share >= LEAST_SHARE:
        return _with_share(config, min(share, SPLIT))
    return None


def refused(config: Config, machine: Machine) -> list[str]:
    """Return the problems of a dry run, except a missing server key, which a run generates."""
    found = [line for line in check(config) if KEY_VARIABLE not in line]
    return found + checks.problems(config, on=machine)


def describe(recipe: str, base: Case) -> tuple[str, bool]:
    """The best few, as lines to paste."""
    found = suggestions(base)
    if not found:
        nothing = f"{base.config.model.path} does not fit {base.machine}, in any layout; name a "
        return nothing + "larger machine with --on", False
    head = ("", "learner and engines", "learner", "engines", "of the memory", "a step", "GPU-hours")
    rows = [_row(number, one) for number, one in enumerate(found, 1)]
    lines = [
        f"{base.config.model.path} on {base.machine}, fastest first:",
        "",
        *table(head, rows),
        "",
    ]
    for number, one in enumerate(found, 1):
        words = " ".join(shlex.quote(word) for word in overrides(base.config, one.config))
        lines.append(f"{number}  megatron-rl train {recipe} {words}")
    if any(one.plan.case.roles.distant for one in found):
        lines += [
            "",
            f"node1, node2 ...: names of the site; {KEY_VARIABLE} holds the servers' key "
            "(docs/guides/slurm.md)",
        ]
    return "\n".join(lines), True


def _row(number: int, one: Suggestion) -> tuple[str, ...]:
    found = one.plan
    case = found.case
    learner = axes(case.model.layout)
    if case.recomputed:
        learner += f", {case.recomputed:.0%} recomputed"
    peak = max(memory.peak / memory.limit for memory in found.memory if memory.limit)
    assert found.time is not None and found.gpu_hours is not None
    engines = f"{case.roles.engines} x TP{case.roles.engine_tp}"
    return (
        str(number),
        one.way,
        learner,
        engines,
        f"{peak:.0%}",
        duration(found.time.step),
        f"{found.gpu_hours:,.0f}",
    )


def _samplers(config: Config, machine: Machine) -> Iterator[tuple[str, int, Config]]:
    """(way, ranks of the learner, the recipe with engines of that way)."""
    gpus = machine.gpus
    nodes = machine.nodes
    for tp in (size for size in POWERS if size <= gpus):
        if config.sync.every == 1:
            transport = Transport.ipc if nodes == 1 else Transport.file
            engines = _of_first_node(config, tp, range(gpus), transport, Sleep.discard)
            yield "colocated", gpus * nodes, engines
        if nodes == 1:
            for learner in sorted({gpus // 2, gpus // 4, 3 * gpus // 4, gpus - tp} - {0}):
                if gpus - learner >= tp:
                    engines = _of_first_node(config, tp, range(learner, gpus))
                    yield "apart", learner, engines
        for learner in sorted({nodes // 4, nodes // 2, 3 * nodes // 4} - {0}):
            yield "on nodes apart", learner * gpus, _distant(config, tp, machine, learner)


def _of_first_node(
    config: Config,
    tp: int,
    gpus: range,
    transport: Transport = Transport.file,
    sleep: Sleep = Sleep.none,
) -> Config:
    """As many engines as fit on these GPUs of the first node."""
    count = len(gpus) // tp
    devices = ",".join(map(str, gpus[: count * tp]))
    sync = replace(config.sync, transport=transport)
    changes = {"engines": count, "devices": devices, "sleep": sleep}
    return _with_engines(replace(config, sync=sync), tensor_parallel=tp, **changes)


def _distant(config: Config, tp: int, machine: Machine, learner_nodes: int) -> Config:
    """Engines on the nodes that the learner leaves, served by address."""
    each = machine.gpus // tp
    hosts = range(learner_nodes, machine.nodes)
    addresses = [f"http://node{host}:{8000 + number}" for host in hosts for number in range(each)]
    folder = config.sync.dir or SHARED_FOLDER
    sync = replace(config.sync, transport=Transport.file, dir=folder)
    changes = {"engines": len(addresses), "devices": None, "addresses": addresses}
    return _with_engines(replace(config, sync=sync), tensor_parallel=tp, **changes)


def _with_engines(config: Config, **changes: Any) -> Config:
    """The configuration with engines that have their GPUs to themselves, but for `changes`."""
    alone: dict[str, Any] = {
        "dedicated_nodes": False,
        "addresses": [],
        "formats": [],
        "sleep": Sleep.none,
    }
    sampler = replace(config.sampler, **(alone | changes))
    return _with_share(replace(config, sampler=sampler), SPLIT)


def _learners(base: Case, ranks: int) -> Iterator[LearnerSection]:
    """Every way to share the model over so many ranks."""
    work = base.work
    cp = base.config.learner.context_parallel
    tps = [size for size in POWERS if size <= base.machine.gpus]
    for tp, pp, ep in product(tps, STAGES, POWERS if base.model.shape.experts else (1,)):
        dp, rest = divmod(ranks, tp * pp * cp)
        if rest or dp > max(work.sequences // work.updates, 1):
            continue
        learner = _learner(base, tp, pp, dp, ep)
        model = replace(base.model, layout=Layout.from_config(learner))
        if not problems(model, 1, Format.none):
            for again in (Recompute.none, Recompute.full):
                yield replace(learner, recompute=again)


def _learner(base: Case, tp: int, pp: int, dp: int, ep: int) -> LearnerSection:
    """The recipe's learner with these parallel sizes, and nothing that an old layout decided."""
    learner = base.config.learner
    megatron = {key: value for key, value in learner.megatron.items() if key not in OWNED}
    if tp > 1 or learner.megatron.get("sequence_parallel"):
        megatron["sequence_parallel"] = tp > 1
    if ep > 1 and tp > 1:
        megatron["expert_tensor_parallel_size"] = 1
    return replace(
        learner,
        tensor_parallel=tp,
        pipeline_parallel=pp,
        data_parallel=dp,
        expert_parallel=ep,
        tokens_per_microbatch=max(base.work.longest, LEAST_BUDGET),
        megatron=megatron,
    )


def _with_share(config: Config, share: float) -> Config:
    """The configuration with another part of the memory for engines."""
    sampler = config.sampler
    return replace(
        config, sampler=replace(sampler, vllm={**sampler.vllm, "gpu_memory_utilization": share})
    )


def overrides(base: Config, changed: Config) -> Iterator[str]:
    """The way from one to the other, as the command line takes it."""
    old = flat(base)
    new = flat(changed)
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            yield f"{key}={write_line(new.get(key))}"
