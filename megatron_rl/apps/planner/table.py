"""Text of `megatron-rl plan`, with a table of memory for GPUs of each role (learner, engine,
both).
"""

from collections.abc import Iterator, Sequence

from megatron_rl.apps.planner import summary
from megatron_rl.apps.planner.case import keeps_prefixes
from megatron_rl.apps.planner.memory.engine import GIB
from megatron_rl.apps.planner.phases import MOMENTS, PHASES, Memory
from megatron_rl.apps.planner.plan import Plan, largest_parts
from megatron_rl.apps.planner.time import StepTime
from megatron_rl.preflight.notes import unusual_clip
from megatron_rl.tracking.console import duration, table

OF_SESSIONS = ("turns", "observation", "tool_s")  # of what is assumed


def describe(plan: Plan, changes: Sequence[str] = ()) -> str:
    config = plan.case.config
    recipe = [
        ("learner", summary.arithmetic(config.learner)),
        *summary.objective(config),
        *summary.changed(changes),
    ]
    sections = [
        list(_roles(plan)),
        [f"{name:<9} {text}" for name, text in recipe],
        *(_memory(one) for one in plan.memory),
        list(_rest(plan)),
    ]
    return "\n\n".join("\n".join(section) for section in sections)


def _roles(plan: Plan) -> Iterator[str]:
    """Lines on machine, model, ranks, engines, and the work of a step."""
    case = plan.case
    config = case.config
    roles = case.roles
    work = case.work
    yield f"machine   {case.machine}"
    yield f"model     {config.model.path}: {plan.parameters / 1e6:,.1f} M parameters"
    yield (
        f"learner   {roles.learner:,} ranks ({summary.axes(case.model.layout)}) on {roles.learner_nodes} node(s)"
    )
    each = "GPU" if case.machine.gpus else "rank"
    engines = f"{_count(roles.engines, 'engine')} with {_count(roles.engine_tp, each)} each"
    if case.machine.gpus and roles.local:
        gpus = ",".join(map(str, roles.local))
        engines += f", on GPUs {gpus} of the first node ({len(roles.shared)} shared)"
    if roles.distant:
        engines += f", {roles.distant} of them on other nodes"
    yield f"sampler   {engines}"
    yield (
        f"step      {work.sequences:,} responses, about {work.tokens / 1e6:.2f} M tokens; "
        f"{work.updates} update(s) of {case.packs} micro-batch(es) on each replica"
    )
    if top := config.rollout.top_logprobs.max:
        yield (
            f"top       {top} logprobs a token (rollout.top_logprobs.max): at most "
            f"{_gib(work.top_logprobs)} GiB of a batch, sent by the engines in each step"
        )
    if work.sessions:
        prefilled = work.prefilled(keeps_prefixes(config.sampler))
        yield (
            f"sessions  about {work.turns:g} turns, {work.sampled:,.0f} tokens sampled, "
            f"{work.read:,.0f} read and {prefilled:,.0f} prefilled behind a prompt of "
            f"{work.prompt:,.0f}; {work.open} open at once (environment.max_concurrent)"
        )
        if plan.time:
            yield f"          a rollout waits {duration(plan.time.tools)} for tools"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _seconds(seconds: float) -> str:
    """Duration; two digits where it is short."""
    return f"{seconds:.2g}s" if 0 < seconds < 10 else duration(seconds)


def _memory(memory: Memory) -> list[str]:
    parts = dict.fromkeys(part for phase in MOMENTS for part in memory.phases[phase])
    head = (f"{memory.what}: {memory.kind} ({memory.gpus})", *MOMENTS)
    rows = [
        (part, *(_gib(memory.phases[phase].get(part, 0.0)) for phase in MOMENTS)) for part in parts
    ]
    rows.append(("all, in GiB", *(_gib(sum(memory.phases[phase].values())) for phase in MOMENTS)))
    most = _gib(memory.peak)
    if memory.limit is not None:
        most += f" of {_gib(memory.limit)}"
    most += f" GiB in {memory.peak_phase} ({largest_parts(memory.at_peak)})"
    return [*table(head, rows), f"  {memory.verdict}: {most}"]


def _gib(nbytes: float) -> str:
    if not nbytes:
        return "-"
    if nbytes >= 0.05 * GIB:
        return f"{nbytes / GIB:.1f}"
    return f"{nbytes / GIB:.4f}"


def _rest(plan: Plan) -> Iterator[str]:
    """Lines on cache, checkpoint, CPU memory, staleness and time."""
    case = plan.case
    config = case.config
    cache = plan.cache
    yield (
        f"cache     {cache.tokens:,} tokens of an engine: {cache.at_limits:,} sequences at their "
        f"limit of {case.work.longest:,}, {cache.at_mean:,} at the mean; sampler.vllm.max_num_seqs "
        f"is {cache.wanted}"
    )
    yield f"save      {_gib(plan.kept_gib * GIB)} GiB, and as much CPU memory of all nodes together"
    if plan.host:
        parts = ", ".join(f"{part} {_gib(nbytes)}" for part, nbytes in plan.host.items())
        has = f"{case.machine.host_gib:.0f}" if case.machine.host_gib else "not known"
        yield (
            f"host      about {_gib(sum(plan.host.values()))} GiB of the first node's own memory "
            f"({parts}); it has: {has}"
        )
    old = max(config.rollout.max_staleness, config.sync.every - 1)
    yield (
        f"staleness responses are up to {old} step(s) old when a step begins; its last optimizer "
        f"update comes {config.learner.n_minibatches - 1} update(s) later"
    )
    if plan.time is None:
        yield "time      not known for this machine; --on names one, such as 1x8xH100-80"
    else:
        yield from _time(plan.time, plan)
    yield from (f"note      {note}" for note in (*plan.notes, *unusual_clip(config.loss)))


def _time(time: StepTime, plan: Plan) -> Iterator[str]:
    """Lines on the seconds of a step, and on what they assume."""
    config = plan.case.config
    work = plan.case.work
    phases = ", ".join(f"{phase} {_seconds(getattr(time, phase))}" for phase in PHASES)
    steps = config.run.steps
    yield f"time      a step {_seconds(time.step)}: {phases}"
    yield (
        f"          {steps} steps {duration(time.step * steps)} and {plan.gpu_hours:,.0f} "
        "GPU-hours (without evaluations; early steps have shorter responses)"
    )
    yield (
        f"          rollout: {time.decoded} sequences together, {time.decode_s * 1e3:.0f} ms for a "
        f"token of each; update: {time.talking:.0%} in collectives, {time.bubble:.0%} waiting for "
        f"stages, {time.mfu:.0%} of the GPUs' peak (docs/guides/slurm.md)"
    )
    if time.ahead:
        waits = "sampler waits for weights"
        if time.rollout > time.learner:
            waits = "learner waits for responses"
        waiting = work.waiting_bytes(config.rollout.max_staleness)
        yield (
            f"ahead     {_seconds(time.overlap)} of a step overlap, the {waits}; batches that wait "
            f"take {_gib(waiting)} GiB of CPU memory on the driver's node"
        )
    known = vars(plan.case.assumed)
    if not work.sessions:
        known = {name: value for name, value in known.items() if name not in OF_SESSIONS}
    yield "assumed   " + ", ".join(f"{name} {value:g}" for name, value in known.items())
