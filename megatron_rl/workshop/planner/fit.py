"""Costs of `megatron-rl plan --precision`: a step's seconds part by part, and (`--fit RUN`) what
runs say of them.

On hosts without a GPU a part is how often something is done, times what it costs; engines and ranks
share the cores, so that what is computed takes as long on one of them as on several. A run gives
one measured time for each phase, the lower quartile of its steps, and its lengths. The factors of a
phase's costs are those with the smallest squares of relative errors over all runs; where the runs
leave some free, they stay by the one factor that suits all of the phase.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

import numpy as np

from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.fleet import max_sequences
from megatron_rl.config.prox_pass import makes_prox_pass
from megatron_rl.config.schema import Config, Device, Format, KvCache
from megatron_rl.files import read_json
from megatron_rl.learner.modules.costs import operations
from megatron_rl.models.mapping import parameters
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine
from megatron_rl.quantization.formats import QUANTIZED
from megatron_rl.runs.metrics_file import SAMPLE_SIZE, read_metrics
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.planner.case import Assumptions, Case, keeps_prefixes
from megatron_rl.workshop.planner.time import GIGA, parts

Part = tuple[str, str]  # phase, what takes its time
Parts = Mapping[Part, float]

# tokens of a prefix that vLLM keeps on hosts; what fills no block is prefilled for each answer
BLOCK = 128
# seconds of one; `--fit` puts a host's own in their place. One thread of an AMD EPYC (Zen 5:
# AVX-512, BF16, VNNI), from the runs of tools/bench/precision.py that constants are taken from
COSTS = {
    "step": 2e-3,  # of an engine: one token of every sequence under way
    "layer": 1.1e-3,  # of such a step, and of a micro-batch of the learner
    "token": 2e-5,  # sampled
    "attention": 1 / (5 * GIGA),  # an operation
    "head": 1 / (150 * GIGA),
    "none": 1 / (150 * GIGA),  # an operation of the layers' matrices, by their format
    "int8": 1 / (300 * GIGA),
    "fp8": 1 / (150 * GIGA),
    "int4": 1 / (300 * GIGA),
    "rounding": 1 / GIGA,  # an activation, where a matrix is quantized
    "rounding fp8": 25 / GIGA,  # by a cast to FP8 and back
    "calls": 2.5e-4,  # more of a layer's step where its matrices are quantized
    "update": 1e-2,
    "weight": 3e-9,  # of the optimizer
    "sync": 2.5e-2,
    "byte": 1e-9,  # written, read, checked
    "quantized": 2e-9,  # a weight
}
# of a run: those that are read, of them left out, and how many there have to be
STEPS = 20
WARMING = 2
LEAST = 5
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
            f"--fit {run}: it has no metrics.jsonl and config.yaml; give the folder of a run, such "
            "as runs/NAME"
        )
    lines = read_metrics(found.metrics)[:STEPS]
    lines = [line for line in lines if line.get("time/rollout") and line.get("rollout/n")][WARMING:]
    if len(lines) < LEAST:
        raise ConfigError(
            f"--fit {run}: {len(lines)} step(s) behind the {WARMING} that warm up, and {LEAST} are "
            f"needed; let the run take {WARMING + LEAST} steps (run.steps), or give one that has"
        )
    config = recorded_config(found.config)
    try:
        on_gpus = bool(read_json(found.env).get("devices"))
    except ValueError as error:
        raise ConfigError(
            f"--fit {run}: env.json, which says what it ran on, cannot be read ({error})"
        ) from None
    if on_gpus != (machine.kind == Device.cuda):
        raise ConfigError(
            f"--fit {run}: it ran on {'GPUs' if machine.kind == Device.cpu else 'a host'}, and the "
            f"plan is for {machine}; give a run of such a machine, or name the run's with --on"
        )
    try:
        hf_config = read_card(str(config.model.folder))
    except ConfigError as error:
        raise ConfigError(
            f"--fit {run}: {error}; or plan in the folder that the run was started in"
        ) from None
    middle = {
        name: median(line.get(name, 0.0) for line in lines) for line in lines for name in line
    }
    case = Case(config, hf_config, machine, _lengths(config, middle))
    if config.rollout.ahead and middle.get("rollout/seconds"):
        rollout = "rollout/seconds"
    else:
        rollout = "time/rollout"
    seconds = {phase: _quick(lines, f"time/{phase}") for phase in ("prox", "update")}
    seconds |= {
        "rollout": _quick(lines, rollout),
        "sync": _quick(lines, "sync/total_s") / config.sync.every,
    }
    return Measured(run, case, seconds, middle.get(SAMPLE_SIZE), len(lines))


def _quick(lines: Sequence[Mapping[str, float]], name: str) -> float:
    """The lower quartile: what else a machine does makes steps longer, and none shorter."""
    taken = [line[name] for line in lines if line.get(name)]
    if len(taken) > 1:
        return quantiles(taken, n=4, method="inclusive")[0]
    return sum(taken)


LENGTHS = ("response", "prompt", "longest", "batches")


def with_lengths(
    assumed: Assumptions, runs: Sequence[Measured], named: Collection[str]
) -> Assumptions:
    """The runs' own lengths, where `--assume` names none."""
    mean = {
        name: sum(getattr(run.case.assumed, name) for run in runs) / len(runs)
        for name in LENGTHS
        if name not in named
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
    if case.host:
        return _on_host(case)
    return parts(case)


def _on_host(case: Case) -> dict[Part, float]:
    """Seconds of each part of each phase; its name, or the first word of it, is a cost's."""
    counted = {**_rollout(case), **_learner(case), **_sync(case)}
    return {
        part: count * (COSTS.get(part[1]) or COSTS[part[1].partition(" ")[0]])
        for part, count in counted.items()
    }


def _rollout(case: Case) -> dict[Part, float]:
    work = case.work
    shape = case.model.shape
    format = case.config.quantization.format
    sequences = work.sequences * case.assumed.batches
    sampled = work.sampled
    each = operations(case.model, 2 * work.halfway)
    longest = case.config.rollout.max_response_tokens * case.assumed.longest * work.turns
    engines = max(case.roles.engines, 1)
    together = min(max_sequences(case.config.sampler) * engines, work.open * case.assumed.batches)
    steps = sequences * sampled / together + max(longest - sampled, 0)
    kept = keeps_prefixes(case.config.sampler)
    block = int(case.config.sampler.vllm.get("block_size", BLOCK))
    shared = kept * (work.prompt // block * block)  # by the answers to a prompt
    first = work.prompt - shared * (1 - 1 / case.config.rollout.samples_per_prompt)
    later = sampled + work.prefilled(kept)
    tokens = sequences * (first + later)
    found = {
        "step": steps,
        "layer": steps * shape.layers,
        "token": sequences * sampled,
        "attention": sequences
        * (first * operations(case.model, work.prompt).attention + later * each.attention),
        "head": sequences * sampled * each.head,
        f"{format} products": tokens * (each.dense + each.experts),
    }
    if format in QUANTIZED:
        wide = (
            shape.hidden
            + shape.size("q")
            + shape.hidden
            + (shape.expert_ffn if shape.experts else shape.ffn)
        )
        found |= {
            f"rounding {format}": tokens * shape.layers * wide,
            f"calls {format}": steps * shape.layers,
        }
    return {("rollout", name): count for name, count in found.items()}


def _learner(case: Case) -> dict[Part, float]:
    config = case.config
    work = case.work
    packs = case.packs
    each = operations(case.model, work.length)
    forward = work.tokens * (each.dense + each.experts) + work.sequences * work.response * each.head
    attention = work.tokens * each.attention
    layers = packs * case.model.shape.layers
    scores = makes_prox_pass(config.correction, config.loss, config.learner, config.rollout) + bool(
        config.loss.kl_coef
    )
    return {
        ("update", "update"): work.updates,
        ("update", "weight"): work.updates * parameters(case.model.shape),
        ("update", "layer"): 3 * work.updates * layers,
        ("update", "none products"): (3 + case.recomputed) * forward,
        ("update", "attention"): (3 + case.recomputed) * attention,
        ("prox", "layer"): scores * work.updates * layers,
        ("prox", "none products"): scores * forward,
        ("prox", "attention"): scores * attention,
    }


def _sync(case: Case) -> dict[Part, float]:
    format = case.config.quantization.format
    every = case.config.sync.every
    found = {"sync": 1.0, f"byte {format}": float(case.weights.nbytes)}
    if format in QUANTIZED:
        found[f"quantized {format}"] = float(parameters(case.model.shape))
    return {("sync", name): count / every for name, count in found.items()}


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
                assumed = {
                    part: value / taken
                    for part, value in seconds_of(run.case).items()
                    if part[0] == phase
                }
                rows.append({part: share for part, share in assumed.items() if share})
        names = sorted({part for row in rows for part in row})
        if names:
            shares = np.array([[row.get(name, 0.0) for name in names] for row in rows])
            found, others[phase] = _least_squares(shares)
            factors |= zip(names, map(float, found), strict=True)
    others.setdefault("prox", others.get("update", 1.0))
    return Costs(factors, others)


def _least_squares(shares: np.ndarray) -> tuple[np.ndarray, float]:
    """Factors, none below 0, under which the shares of each row add up to 1; and one factor for
    them all.
    """
    sums = shares.sum(1)
    common = float(sums.sum() / (sums**2).sum())
    found = np.full(shares.shape[1], common)
    gram = shares.T @ shares / len(shares)
    wanted = shares.sum(0) / len(shares)
    free = FREE / common**2
    for _ in range(SWEEPS):
        for at in range(len(found)):
            rest = wanted[at] - gram[at] @ found + gram[at, at] * found[at]
            found[at] = max((rest + free * common) / (gram[at, at] + free), 0.0)
    return found, common
