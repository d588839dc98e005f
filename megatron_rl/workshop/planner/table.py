"""Text of `megatron-rl plan`, with a table of memory for GPUs of each role."""

from collections.abc import Iterator, Sequence

from megatron_rl.config.schema import Config, InFlight, RolloutSection
from megatron_rl.preflight.notes import unusual_clip
from megatron_rl.runs.console import duration, table
from megatron_rl.workshop.planner import summary
from megatron_rl.workshop.planner.case import keeps_prefixes
from megatron_rl.workshop.planner.memory.engine import GIB
from megatron_rl.workshop.planner.phases import MOMENTS, PHASES, Memory
from megatron_rl.workshop.planner.plan import Plan
from megatron_rl.workshop.planner.time import FP8_PAYS, StepTime

OF_SESSIONS = ("turns", "observation", "tool_s")  # of what is assumed


def describe(config: Config, plan: Plan, changes: Sequence[str] = ()) -> str:
    rows = [
        ("learner", summary.arithmetic(config.learner)),
        *summary.objective(config),
        *summary.changed(changes),
    ]
    told = [f"{name:<9} {text}" for name, text in rows]
    sections = [
        list(_who(config, plan)),
        told,
        *(_memory(one) for one in plan.memory),
        list(_rest(config, plan)),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _who(config: Config, plan: Plan) -> Iterator[str]:
    roles = plan.roles
    work = plan.work
    if roles.learner_nodes > 1:
        where = f"{roles.learner_nodes} node(s), {roles.tasks_per_node} on each"
    else:
        where = "one node"
    yield f"machine   {plan.machine}"
    yield f"model     {config.model.path}: {plan.parameters / 1e6:,.1f} M parameters"
    yield f"learner   {roles.learner:,} ranks ({summary.axes(plan.layout)}) on {where}"
    if roles.shared:
        beside = f", {len(roles.shared)} of them the learner's, too"
    else:
        beside = ""
    if roles.local:
        local = f"GPUs {', '.join(map(str, roles.local))} of the first node{beside}"
    else:
        local = "other nodes"
    local = local if plan.machine.gpus else "this host"
    if roles.distant and roles.local:
        others = f" and {roles.distant} on other nodes"
    else:
        others = ""
    yield f"sampler   {roles.engines:,} engine(s) of {roles.engine_tp} on {local}{others}"
    yield (
        f"step      {work.sequences:,} answers, about {work.tokens / 1e6:.2f} M tokens; "
        f"{work.updates} update(s) of {plan.packs} micro-batch(es) on each replica"
    )
    if work.sessions:
        yield from _sessions(config, plan)


def _sessions(config: Config, plan: Plan) -> Iterator[str]:
    work = plan.work
    time = plan.time
    kept = keeps_prefixes(config.sampler)
    yield (
        f"sessions  about {work.turns:g} turns, {work.sampled:,.0f} tokens sampled and "
        f"{work.read:,.0f} read behind a prompt of {work.prompt:,.0f}; {work.open} open at once "
        "(environment.sessions)"
    )
    yield (
        f"          an engine prefills {work.prefilled(kept):,.0f} of them for each, "
        f"{work.prefilled(not kept):,.0f} {'without' if kept else 'with'} "
        "sampler.vllm.enable_prefix_caching"
        + (f", which would take {duration(time.cold)} {'more' if kept else 'less'}" if time else "")
    )
    if time:
        worked = work.sequences * (work.turns - 1) * plan.assumed.tool_s
        waiting = time.in_tools * work.halfway
        yield (
            f"          tools work {duration(worked)} in a step, all sessions together, and a "
            f"rollout waits {duration(time.tools)} for them; {time.in_tools:,.0f} of an engine's "
            f"{work.open_of(plan.roles.engines)}"
        )
        yield (
            f"          open sessions are at a tool and keep {waiting:,.0f} tokens of its cache "
            f"meanwhile, all of them {plan.cache.open:,}"
        )


def _memory(memory: Memory) -> list[str]:
    parts = dict.fromkeys(part for phase in MOMENTS for part in memory.phases[phase])
    head = (f"{memory.what}: {memory.kind} ({memory.gpus})", *MOMENTS)
    rows = [
        (part, *(_gib(memory.phases[phase].get(part, 0.0)) for phase in MOMENTS)) for part in parts
    ]
    rows.append(("all, in GiB", *(_gib(sum(memory.phases[phase].values())) for phase in MOMENTS)))
    most = sorted(memory.at_peak.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{part} {nbytes / memory.peak:.0%}" for part, nbytes in most)
    lines = table(head, rows)
    if memory.limit is None or memory.margin is None:
        return [*lines, f"  most in {memory.peak_phase}: {told}"]
    less = f"{abs(memory.margin) / GIB:.1f} GiB {'left' if memory.margin >= 0 else 'too much'}"
    usable = f"{_gib(memory.peak)} of {_gib(memory.limit)} GiB in {memory.peak_phase} ({told})"
    return [*lines, f"  {memory.verdict}: {usable}; {less}"]


def _ahead(time: StepTime, plan: Plan, rollout: RolloutSection) -> Iterator[str]:
    if time.rollout > time.learner:
        waits = "learner waits for answers"
    else:
        waits = "sampler waits for updates"
    yield (
        f"ahead     {duration(time.overlap)} of a step overlap, in turns it would take "
        f"{duration(time.in_turn)}; the {waits}. Batches that wait take "
        f"{_gib(plan.work.waiting_bytes(rollout.ahead))} GiB of the driver's host"
    )
    # an update that comes into the middle of an answer makes the rest of it younger
    if rollout.in_flight is InFlight.continue_:
        older = min(1.0, time.learner / time.rollout)
    else:
        older = 1.0
    yield f"          engines stand still for {duration(time.pause)} of a sync of {duration(time.sync)}"
    yield f"          about {older:.0%} of a batch's tokens are {rollout.ahead} update(s) old, the others younger"


def _gib(nbytes: float) -> str:
    if not nbytes:
        return "-"
    if nbytes >= 0.05 * GIB:
        return f"{nbytes / GIB:.1f}"
    return f"{nbytes / GIB:.4f}"


def _rest(config: Config, plan: Plan) -> Iterator[str]:
    cache = plan.cache
    sync = config.sync
    learner = config.learner
    yield (
        f"cache     {cache.tokens:,} tokens of an engine: {cache.at_limits:,} sequences at their "
        f"limit of {plan.work.longest:,}, {cache.at_mean:,} at the mean; sampler.vllm.max_num_seqs "
        f"is {cache.wanted}"
    )
    yield f"save      {_gib(plan.kept_gib * GIB)} GiB, and as much of the hosts' memory together"
    if plan.host:
        parts = ", ".join(f"{part} {_gib(nbytes)}" for part, nbytes in plan.host.items())
        has = plan.machine.host_gib
        if has:
            there = f"this one has {has:.0f}"
        else:
            there = "how much that one has is not known"
        yield f"host      about {_gib(sum(plan.host.values()))} GiB of the first node's own memory ({parts}); {there}"
    old = max(config.rollout.ahead, sync.every - 1)
    if old:
        behind = f"answers are up to {old} update(s) of the sampler old"
    else:
        behind = ""
    within = f"the last of a step's updates is {learner.n_minibatches - 1} behind them" * (
        learner.n_minibatches > 1
    )
    yield f"staleness {'; '.join(filter(None, (behind, within))) or 'none: each answer is of the policy it trains'}"
    if plan.time is None:
        yield "time      not known for this machine; --on names one, such as 1x8xH100-80"
    else:
        yield from _time(plan.time, plan, config)
    yield from (f"note      {note}" for note in (*plan.notes, *unusual_clip(config.loss)))


def _time(time: StepTime, plan: Plan, config: Config) -> Iterator[str]:
    phases = ", ".join(
        f"{phase} {duration(getattr(time, phase))}"
        for phase in PHASES
        if getattr(time, phase) >= 0.5
    )
    steps = config.run.steps
    yield f"time      a step {duration(time.step)}: {phases}"
    yield (
        f"          {steps} steps {duration(time.step * steps)} and {plan.gpu_hours:,.0f} "
        "GPU-hours (without evaluations; early steps have shorter answers)"
    )
    yield (
        f"          rollout: {time.decoded} sequences together, {time.decode_s * 1e3:.0f} ms for a "
        f"token of each; update: {time.talking:.0%} in collectives, {time.bubble:.0%} waiting for "
        "stages"
    )
    yield (
        f"          an update gets {time.mfu:.0%} of the GPUs' peak, counted by launches, bytes "
        "and products (docs/scale.md)"
    )
    if time.ahead:
        yield from _ahead(time, plan, config.rollout)
    word = "less" if time.fp8_s >= 0 else "more"
    yield (
        f"fp8       a learner in FP8 takes about {duration(abs(time.fp8_s))} {word} for "
        f"{plan.work.tokens / 1e6:.2f} M tokens than in BF16, and 2 bytes more for each weight; it "
        f"pays above {FP8_PAYS / 1e6:.2f} M tokens a step"
    )
    known = vars(plan.assumed)
    if not plan.work.sessions:
        known = {name: value for name, value in known.items() if name not in OF_SESSIONS}
    yield "assumed   " + ", ".join(f"{name} {value:g}" for name, value in known.items())
