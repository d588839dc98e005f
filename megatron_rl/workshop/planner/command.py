"""Text or JSON of `megatron-rl plan`, and the problems found: a recipe's plan and weight sync, or
in their place what --suggest, --precision or --sbatch ask for. commands/recipes.py parses the
command line, and prints.

A model's config.json in place of a recipe stands for its sync alone; with --on, --suggest or
--precision for the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, cluster
from megatron_rl.config.load import CONF, changes, load, read
from megatron_rl.config.schema import Config
from megatron_rl.models.model import read_hf_config
from megatron_rl.preflight import checks
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import NoGpu, detect, named, own
from megatron_rl.workshop.planner import fit, precision, slurm, suggest, table, traffic
from megatron_rl.workshop.planner.case import Assumptions, Case
from megatron_rl.workshop.planner.plan import Plan, plan_case


@dataclass(frozen=True, kw_only=True)
class Request(traffic.Request):
    """What the command line asks for, each by the name of its option."""

    target: Path  # a recipe, a config.json, or a folder that holds one
    overrides: Sequence[str] = ()
    on: str | None = None
    assume: Sequence[str] = ()  # name=value
    as_json: bool = False
    suggest: bool = False
    sbatch: bool = False
    precision: bool = False
    fit: Sequence[Path] = ()  # folders of runs


def answer(request: Request) -> tuple[str, list[str]]:
    """What is to be printed, and what is wrong with the recipe."""
    config, found, hf_config, whole = _read(request)
    assumed = assumptions(request.assume)
    on = _elsewhere(request, config, whole)
    machine = named(on) if on else None
    if request.fit and not request.precision:
        raise ConfigError("--fit: what runs say is for --precision; give that, too")
    if request.precision and hf_config is not None and not found:
        if problems := traffic.problems(config, hf_config, request):
            return "", problems
        return _precision(
            request, Case(config, hf_config, machine or detect(config.run.device), assumed)
        ), []
    if request.suggest and hf_config is not None:
        base = Case(config, hf_config, machine or detect(config.run.device), assumed)
        said, fits = suggest.describe(str(request.target), base)
        return said, [] if fits else [f"--suggest: {said.splitlines()[0]}"]
    problems = [*found, *(checks.problems(config, on=machine) if whole else [])]
    if hf_config is None:
        return "", problems
    problems += [
        line for line in traffic.problems(config, hf_config, request) if line not in problems
    ]
    made = None
    if whole or machine:
        made = _plan(
            Case(config, hf_config, machine or detect(config.run.device), assumed), problems
        )
    problems += made.problems if made else ()
    if request.sbatch:
        return (
            slurm.sbatch(request.target, request.overrides, config, made) if made else ""
        ), problems
    if found or (made is None and problems):
        return "", problems
    moves = not problems or (made is not None and problems == list(made.problems))
    if request.as_json:
        about: dict[str, Any] = {
            "model": config.model.path,
            "problems": problems,
            **(as_json(made) if made else {}),
        }
        about |= {"sync": traffic.numbers(config, hf_config, request)} if moves else {}
        return json.dumps(about | {"problems": problems}, indent=2), problems
    if whole:
        changed = list(changes(request.target, request.overrides))
    else:
        changed = []
    texts = [table.describe(config, made, changed)] if made else []
    return "\n\n".join(
        [*texts, *([traffic.describe(config, hf_config, request)] if moves else [])]
    ), problems


def _precision(request: Request, case: Case) -> str:
    runs = [fit.measured(run, case.machine) for run in request.fit]
    if runs:
        named = {word.partition("=")[0] for word in request.assume}
        case = replace(case, assumed=fit.with_lengths(case.assumed, runs, named))
    if request.as_json:
        return json.dumps(precision.as_json(case, runs), indent=2)
    return precision.describe(case, runs)


def assumptions(given: Sequence[str]) -> Assumptions:
    known = {one.name: one.default for one in fields(Assumptions)}
    values = {}
    for word in given:
        name, _, value = word.partition("=")
        if name not in known:
            raise ConfigError(f"--assume {word}: known are {', '.join(known)}")
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = 0.0
        if not 0 < values[name] < float("inf"):
            raise ConfigError(
                f"--assume {word}: expected a number above 0, such as {name}={known[name]:g}"
            )
    return Assumptions(**values)


def as_json(made: Plan) -> dict[str, Any]:
    about: dict[str, Any] = {"verdict": made.verdict, **asdict(made), "machine": str(made.machine)}
    about["roles"] |= {name: getattr(made.roles, name) for name in ("gpus", "nodes", "kinds")}
    told = ("kind", "gpus", "verdict", "peak_phase", "peak", "limit", "margin", "phases")
    about["memory"] = [{name: getattr(one, name) for name in told} for one in made.memory]
    about["time"] = made.time and {**asdict(made.time), "step": made.time.step}
    return about


def _read(request: Request) -> tuple[Config, list[str], dict[str, Any] | None, bool]:
    """The configuration, what is wrong with its file, the model, and whether it is a whole
    recipe.
    """
    if (request.target / "config.json").is_file():
        target = request.target / "config.json"
    else:
        target = request.target
    if target.suffix == ".json":
        return (
            load(CONF / "base.yaml", [f"model.path={target}", *request.overrides]),
            [],
            read_hf_config(target),
            False,
        )
    config, found = read(target, request.overrides)
    try:
        return config, found, read_card(str(config.model.folder)), True
    except ConfigError as error:
        return config, [*found, *([str(error)] if config.model.path else [])], None, True


def _elsewhere(request: Request, config: Config, whole: bool) -> str | None:
    """The machine to plan for, unless it is this one: where a recipe needs a GPU and none is here,
    its cluster's.
    """
    if request.on is None and whole:
        try:
            detect(config.run.device)
        except NoGpu:
            return cluster(request.target, request.overrides)[1]
    if request.on == "own":
        return own(request.target, request.overrides)
    return request.on


def _plan(case: Case, problems: Sequence[str]) -> Plan | None:
    """None where sizes do not go together."""
    try:
        case.model.layout.stage_layers(case.model.shape.layers)
        return plan_case(case)
    except (ValueError, ConfigError):
        if not problems:
            raise
        return None
