"""`megatron-rl plan --precision`: seconds of a step by the sampler's format, and from where on low
precision pays.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import log
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Format, KvCache
from megatron_rl.models.mapping import parameters
from megatron_rl.preflight import engine
from megatron_rl.quantization.formats import format_problem
from megatron_rl.runs.console import table
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.fit import Costs, Measured, fitted, seconds_of
from megatron_rl.workshop.planner.recompute import decided

PHASES = ("rollout", "prox", "update", "sync")
NAMES = {
    "BF16": (Format.none, KvCache.none),
    "INT8": (Format.int8, KvCache.none),
    "FP8": (Format.fp8, KvCache.none),
    "FP8, FP8 cache": (Format.fp8, KvCache.fp8),
}
# of what the recipe has, where a break-even is looked for
FACTORS = tuple(2.0**power for power in range(-5, 6))
TINY = 1e-3  # ratios nearer to 1 than this are no gain and no loss


@dataclass(frozen=True)
class Row:
    """A step with the sampler in one format."""

    name: str
    assumed: bool  # there are runs, and none in this format
    seconds: dict[str, float]  # by phase
    quantizing: float  # of sync
    step: float
    ratio: float  # of a step to one in BF16
    sample_size: float | None  # None: no run of this format says
    breaks: dict[str, str]  # what is varied -> where it pays

    @property
    def title(self) -> str:
        if self.assumed:
            return f"{self.name} (assumed)"
        return self.name


def describe(base: Case, runs: Sequence[Measured]) -> str:
    rows, left_out = rows_of(base, runs)
    head = ("", *PHASES, "quantizing", "step", "of BF16", "sample size")
    lines = [
        f"{base.config.model.path} on {base.machine}: seconds of a step by the sampler's format",
        "",
    ]
    lines += table(head, [_row(row) for row in rows])
    low = [row for row in rows if row.breaks]
    if low:
        names = list(low[0].breaks)
        lines += [
            "",
            *table(
                ("pays", *(row.title for row in low)),
                [(n, *(r.breaks[n] for r in low)) for n in names],
            ),
        ]
    return "\n".join([*lines, "", *_notes(base, runs, rows, left_out)])


def as_json(base: Case, runs: Sequence[Measured]) -> list[dict[str, Any]]:
    return [vars(row) for row in rows_of(base, runs)[0]]


def rows_of(base: Case, runs: Sequence[Measured]) -> tuple[list[Row], list[str]]:
    if not base.host and base.machine.gpu is None:
        raise ConfigError(
            "--precision: for a GPU of a known kind, or a host; name one, such as --on 1x8xH100-80"
        )
    costs = fitted(runs)
    rows = []
    left_out = []
    plain = _step(costs, _with(base, "BF16"))
    known = {one.sampler for one in runs}
    for name in NAMES:
        case = _with(base, name)
        if why := _refused(case):
            left_out.append(f"{name}: {why}")
            continue
        seconds = costs.phases(case)
        step = _step(costs, case)
        parts = [part for part in seconds_of(case).items() if part[0][1].startswith("quantized ")]
        quantizing = sum(each * costs.of(part) for part, each in parts)
        sizes = [one.sample_size for one in runs if one.sampler == NAMES[name] and one.sample_size]
        breaks = {} if name == "BF16" else dict(_breaks(base, name, costs))
        size = sum(sizes) / len(sizes) if sizes else None
        assumed = bool(runs) and NAMES[name] not in known
        rows.append(Row(name, assumed, seconds, quantizing, step, step / plain, size, breaks))
    return rows, left_out


def _with(base: Case, name: str) -> Case:
    format, cache = NAMES[name]
    config = base.config
    sampler = replace(config.sampler, formats=[])
    quantization = replace(config.quantization, format=format, kv_cache=cache)
    return decided(
        replace(base, config=replace(config, quantization=quantization, sampler=sampler))
    )[0]


def _refused(case: Case) -> str:
    """Why the machine does not run the format."""
    machine = case.machine
    quantization = case.config.quantization
    format = format_problem(quantization.format, machine.kind, machine.name, machine.capability)
    return format or next(engine.cache(machine, quantization), "")


def _step(costs: Costs, case: Case) -> float:
    seconds = costs.phases(case)
    learner = seconds["prox"] + seconds["update"]
    if case.config.rollout.ahead:
        overlap = min(seconds["rollout"], learner)
    else:
        overlap = 0.0
    return sum(seconds.values()) - overlap


def _breaks(base: Case, name: str, costs: Costs) -> Iterator[tuple[str, str]]:
    """Where a step takes less than in BF16, along each of what may be larger or smaller."""
    rollout = base.config.rollout
    layers = base.model.shape.layers

    def varied(key: str, of_each: int) -> Iterator[tuple[float, Case]]:
        for factor in FACTORS:
            value: Any = max(round(getattr(rollout, key) * factor), 1)
            changed = replace(base.config, rollout=replace(rollout, **{key: value}))
            yield value * of_each, replace(base, config=changed)

    def widened() -> Iterator[tuple[float, Case]]:
        for factor in FACTORS:
            with suppress(ValueError):  # no model may be that wide
                wider = replace(base, hf_config=_scaled(base, factor))
                yield parameters(wider.model.shape), wider

    mean = f"{base.assumed.response:.0%} of it the mean"
    yield (
        f"answers of at most so many tokens ({mean})",
        _where(varied("max_response_tokens", 1), name, costs),
    )
    yield (
        "answers in a step",
        _where(varied("prompts_per_step", rollout.samples_per_prompt), name, costs),
    )
    yield f"parameters ({layers} layers)", _where(widened(), name, costs)


def _scaled(base: Case, factor: float) -> dict[str, Any]:
    """A model's config.json with wider layers: more heads of the same size."""
    given = base.hf_config
    shape = base.model.shape
    groups = max(round(shape.kv_heads * factor), 1)
    sizes = [
        key
        for key in ("hidden_size", "intermediate_size", "moe_intermediate_size")
        if given.get(key)
    ]
    wide = {key: max(round(given[key] * factor / 16), 1) * 16 for key in sizes}
    heads = {
        "num_attention_heads": groups * (shape.heads // shape.kv_heads),
        "num_key_value_heads": groups,
    }
    return {**given, **wide, **heads, "head_dim": shape.head_dim}


def _where(cases: Iterable[tuple[float, Case]], name: str, costs: Costs) -> str:
    """In words; cases in which an engine in BF16 has no room for the longest answer are left
    out.
    """
    # size -> logarithm of the ratio, and a hair: as long as in BF16 is no gain
    points: dict[float, float] = {}
    for size, case in cases:
        plain = _with(case, "BF16")
        if plain.limit is None or plain.engine.tokens >= plain.longest:
            points[size] = log(_step(costs, _with(case, name)) / _step(costs, plain)) + TINY
    if not points:
        return "not known: BF16 has no room"
    sizes = sorted(points)
    pays = {one < 0 for one in points.values()}
    if len(pays) == 1:
        return f"{'every' if pays == {True} else 'no'}where from {_short(sizes[0])} to {_short(sizes[-1])}"
    turns = []
    for one, two in pairwise(sizes):
        if (points[one] < 0) != (points[two] < 0):
            even = one * (two / one) ** (points[one] / (points[one] - points[two]))
            turns.append(f"{'below' if points[one] < 0 else 'above'} {_short(even)}")
    return " and ".join(turns)


def _short(number: float) -> str:
    unit, size = next(
        ((unit, size) for unit, size in ((" B", 1e9), (" M", 1e6)) if number >= size), ("", 1)
    )
    return f"{float(f'{number / size:.2g}'):,.10g}{unit}"


def _row(row: Row) -> tuple[str, ...]:
    if row.sample_size is None:
        size = "not known"
    else:
        size = f"{row.sample_size:.1%}"
    cells = (*(row.seconds[phase] for phase in PHASES), row.quantizing, row.step)
    told = (f"{cell:,.0f}" if cell >= 100 else f"{cell:.3g}" for cell in cells)
    return (row.title, *told, f"{row.ratio:.2f}", size)


def _notes(
    base: Case, runs: Sequence[Measured], rows: Sequence[Row], left_out: Sequence[str]
) -> Iterator[str]:
    if runs:
        yield "fitted    to " + ", ".join(
            f"{one.run} ({one.sampler[0]}, {one.steps} steps)" for one in runs
        )
        if any(row.assumed for row in rows):
            yield "assumed   costs of formats that no run had, at the factor that suits the runs; --fit one of each"
    else:
        if base.host:
            where = "one thread of a Zen 5 with AVX-512, BF16 and VNNI"
        else:
            where = "the maker's peaks and --assume"
        yield f"assumed   costs of {where}; --fit RUN takes them from a run, best from one of each format"
    yield "size      of a sample: the share of a batch that the correction's weights leave, by the runs"
    yield from (f"left out  {why}" for why in left_out)
