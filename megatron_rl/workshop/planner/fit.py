"""`--fit RUN`: what the first steps of runs say about the costs that a plan of seconds assumes.

A run gives one measured time for each phase, the lower quartile of its steps, and its lengths. The factors of a phase's
costs are those with the smallest squares of relative errors over all runs; where the runs leave some free, they stay by
the one factor that suits all of the phase.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.schema import Config, Device, Format, KvCache
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine
from megatron_rl.runs.metrics_file import SAMPLE_SIZE, read_metrics
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.host_time import Part, Parts, parts
from megatron_rl.workshop.planner.time import parts as parts_of_gpus
from megatron_rl.workshop.planner.workload import Assumptions

STEPS, WARMING, LEAST = 20, 2, 5  # of a run: those that are read, of them left out, and how many there have to be
FREE = 0.002  # a cost of twice the others' factor weighs as much as a run that is missed by 4.5 %
SWEEPS = 2000


@dataclass(frozen=True)
class Measured:
    """A run's first steps."""

    run: Path
    case: Case  # with the lengths that they had
    seconds: Mapping[str, float]  # by phase
    sample_size: float | None
    steps: int

    @property
    def sampler(self) -> tuple[Format, KvCache]:
        return self.case.config.quantization.format, self.case.config.quantization.kv_cache


def measured(run: Path, machine: Machine) -> Measured:
    found = RunDir(run)
    if not (found.metrics.is_file() and found.config.is_file()):
        raise ConfigError(
            f"--fit {run}: it has no metrics.jsonl and config.yaml; give the folder of a run, such as runs/NAME"
        )
    lines = read_metrics(found.metrics)[:STEPS]
    lines = [line for line in lines if line.get("time/rollout") and line.get("rollout/n")][WARMING:]
    if len(lines) < LEAST:
        raise ConfigError(
            f"--fit {run}: {len(lines)} step(s) behind the {WARMING} that warm up, and {LEAST} are needed; let the run "
            f"take {WARMING + LEAST} steps (run.steps), or give one that has"
        )
    config = recorded_config(found.config)
    if bool(json.loads(found.env.read_text()).get("devices")) != (machine.kind == Device.cuda):
        raise ConfigError(
            f"--fit {run}: it ran on {'GPUs' if machine.kind == Device.cpu else 'a host'}, and the plan is for "
            f"{machine}; give a run of such a machine, or name the run's with --on"
        )
    try:
        hf_config = read_card(str(config.model.folder))
    except ConfigError as error:
        raise ConfigError(f"--fit {run}: {error}; or plan in the folder that the run was started in") from None
    middle = {name: median(line.get(name, 0.0) for line in lines) for line in lines for name in line}
    case = Case(config, hf_config, machine, _lengths(config, middle))
    rollout = "rollout/seconds" if config.rollout.ahead and middle.get("rollout/seconds") else "time/rollout"
    seconds = {phase: _quick(lines, f"time/{phase}") for phase in ("prox", "update")}
    seconds |= {"rollout": _quick(lines, rollout), "sync": _quick(lines, "sync/total_s") / config.sync.every}
    return Measured(run, case, seconds, middle.get(SAMPLE_SIZE), len(lines))


def _quick(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """The lower quartile: what else a machine does makes steps longer, and none shorter."""
    taken = [line[name] for line in lines if line.get(name)]
    return quantiles(taken, n=4, method="inclusive")[0] if len(taken) > 1 else sum(taken)


LENGTHS = ("response", "prompt", "longest", "batches")


def with_lengths(assumed: Assumptions, runs: Sequence[Measured], named: Collection[str]) -> Assumptions:
    """The runs' own lengths, where `--assume` names none."""
    mean = {
        name: sum(getattr(run.case.assumed, name) for run in runs) / len(runs) for name in LENGTHS if name not in named
    }
    return replace(assumed, **mean)


def _lengths(config: Config, middle: Mapping[str, float]) -> Assumptions:
    rollout = config.rollout
    answered = middle["rollout/response_tokens_mean"] / rollout.max_response_tokens
    return replace(
        Assumptions(),
        response=answered,
        prompt=middle["rollout/prompt_tokens_mean"] / rollout.max_prompt_tokens,
        longest=max(middle["rollout/response_tokens_max"] / rollout.max_response_tokens, answered),
        batches=middle["rollout/n"] / (rollout.prompts_per_step * rollout.samples_per_prompt),
    )


def seconds_of(case: Case) -> dict[Part, float]:
    return parts(case) if case.host else parts_of_gpus(case)


@dataclass(frozen=True)
class Costs:
    """Factors of the costs that are assumed."""

    factors: Mapping[Part, float]
    others: Mapping[str, float]  # by phase: of costs that no run had

    def phases(self, case: Case) -> dict[str, float]:
        found: dict[str, float] = {}
        for part, seconds in seconds_of(case).items():
            found[part[0]] = found.get(part[0], 0.0) + seconds * self.of(part)
        return found

    def of(self, part: Part) -> float:
        return self.factors.get(part, self.others.get(part[0], 1.0))


def fitted(runs: Sequence[Measured]) -> Costs:
    factors: dict[Part, float] = {}
    others: dict[str, float] = {}
    for phase in ("rollout", "prox", "update", "sync"):
        rows: list[Parts] = []
        for run in runs:
            taken = run.seconds[phase]
            if taken > 0:
                assumed = {part: value / taken for part, value in seconds_of(run.case).items() if part[0] == phase}
                rows.append({part: share for part, share in assumed.items() if share})
        names = sorted({part for row in rows for part in row})
        if names:
            shares = np.array([[row.get(name, 0.0) for name in names] for row in rows])
            found, others[phase] = _least_squares(shares)
            factors |= zip(names, map(float, found), strict=True)
    others.setdefault("prox", others.get("update", 1.0))
    return Costs(factors, others)


def _least_squares(shares: np.ndarray) -> tuple[np.ndarray, float]:
    """Factors, none below 0, under which the shares of each row add up to 1; and one factor for them all."""
    sums = shares.sum(1)
    common = float(sums.sum() / (sums**2).sum())
    found = np.full(shares.shape[1], common)
    gram, wanted = shares.T @ shares / len(shares), shares.sum(0) / len(shares)
    free = FREE / common**2
    for _ in range(SWEEPS):
        for at in range(len(found)):
            rest = wanted[at] - gram[at] @ found + gram[at, at] * found[at]
            found[at] = max((rest + free * common) / (gram[at, at] + free), 0.0)
    return found, common
