"""Seconds of a step on GPUs by the sampler's format (`megatron-rl plan --precision`)."""

from dataclasses import dataclass, replace

from megatron_rl.apps.planner.case import Case
from megatron_rl.apps.planner.phases import PHASES, decided
from megatron_rl.apps.planner.time import step_time
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Format, KvCache
from megatron_rl.preflight import engine
from megatron_rl.quantization.formats import format_problem
from megatron_rl.tracking.console import table

NAMES = {
    "BF16": (Format.none, KvCache.none),
    "INT8": (Format.int8, KvCache.none),
    "FP8": (Format.fp8, KvCache.none),
    "FP8, FP8 cache": (Format.fp8, KvCache.fp8),
}


@dataclass(frozen=True)
class FormatRow:
    """A step with the sampler in one format."""

    name: str
    seconds: dict[str, float]  # by phase
    quantizing: float  # of sync
    step: float
    ratio: float  # of a step to one in BF16


def describe(base: Case) -> str:
    """A table of the formats, with those that the GPU does not run below it."""
    head = ("", *PHASES, "quantizing", "step", "of BF16")
    found, refused = rows(base)
    cells = []
    for row in found:
        seconds = (*row.seconds.values(), row.quantizing, row.step)
        cells.append((row.name, *(f"{each:,.4g}" for each in seconds), f"{row.ratio:.2f}"))
    title = f"{base.config.model.path} on {base.machine}: seconds of a step by the sampler's format"
    notes = [f"left out  {name}: {why}" for name, why in refused.items()]
    assumed = "assumed   the GPU's peaks times efficiencies, which --assume changes"
    return "\n".join([title, "", *table(head, cells), "", assumed, *notes])


def rows(base: Case) -> tuple[list[FormatRow], dict[str, str]]:
    """Return a row for each format that the GPU runs, and the reasons against the others."""
    if base.machine.gpu is None:
        raise ConfigError(
            "--precision: for GPUs of a known kind; name a machine, such as --on 1x8xH100-80"
        )
    found: list[FormatRow] = []
    refused = {}
    for name in NAMES:
        case = _with(base, name)
        if why := _refused(case):
            refused[name] = why
            continue
        time = step_time(case)
        seconds = {phase: getattr(time, phase) for phase in PHASES}
        ratio = time.step / found[0].step if found else 1.0
        found.append(FormatRow(name, seconds, time.quantize, time.step, ratio))
    return found, refused


def _with(base: Case, name: str) -> Case:
    format, cache = NAMES[name]
    config = base.config
    sampler = replace(config.sampler, formats=[])
    quantization = replace(config.quantization, format=format, kv_cache=cache)
    config = replace(config, quantization=quantization, sampler=sampler)
    return decided(replace(base, config=config))[0]


def _refused(case: Case) -> str:
    machine = case.machine
    quantization = case.config.quantization
    why = format_problem(quantization.format, machine.kind, machine.name, machine.capability)
    return why or next(engine.cache(machine, quantization), "")
