"""`megatron-rl plan`: a recipe's ranks, memory, cache and time on a machine, then its weight sync, link by link.

A model's config.json in place of a recipe stands for its sync alone; where `--on` names a machine, for the rest, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, cluster
from megatron_rl.config.load import CONF, load, read
from megatron_rl.config.schema import Config
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.preflight import checks
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import Machine, NoGpu, detect, named, own
from megatron_rl.workshop.planner import slurm, suggest, table, traffic
from megatron_rl.workshop.planner.case import Case
from megatron_rl.workshop.planner.plan import Plan, plan
from megatron_rl.workshop.planner.workload import Assumptions


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    target: Path  # a recipe, a config.json, or a folder that holds one
    overrides: Sequence[str] = ()
    on: str | None = None
    assume: Sequence[str] = ()  # name=value
    as_json: bool = False
    suggest: bool = False
    sbatch: bool = False
    links: traffic.Request = field(default_factory=traffic.Request)


def answer(request: Request) -> tuple[str, list[str]]:
    """What is to be printed, and what is wrong with the recipe."""
    config, found, hf_config, whole = _read(request)
    assumed = assumptions(request.assume)
    request = replace(request, on=_elsewhere(request, config, whole))
    if request.suggest and hf_config is not None:
        base = Case(config, hf_config, _machine(request, config), assumed)
        said, fits = suggest.describe(str(request.target), base)
        return said, [] if fits else [f"--suggest: {said.splitlines()[0]}"]
    problems = [*found, *(checks.problems(config, on=_named(request)) if whole else [])]
    if hf_config is None:
        return "", problems
    problems += [line for line in traffic.problems(config, hf_config, request.links) if line not in problems]
    made = _plan(config, hf_config, request, assumed, problems) if whole or request.on else None
    if made is not None:
        problems += made.problems
    if request.sbatch:
        return (slurm.sbatch(request.target, request.overrides, config, made) if made else ""), problems
    if found or (made is None and problems):
        return "", problems
    if request.as_json:
        return json.dumps(as_json(config, hf_config, made, problems, request.links), indent=2), problems
    sync = (
        []
        if problems and problems != list(made.problems if made else ())
        else [traffic.describe(config, hf_config, request.links)]
    )
    return "\n\n".join([*([table.describe(config, made)] if made else []), *sync]), problems


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
            raise ConfigError(f"--assume {word}: expected a number above 0, such as {name}={known[name]:g}") from None
        if not 0 < values[name] < float("inf"):
            raise ConfigError(f"--assume {word}: expected a number above 0, such as {name}={known[name]:g}")
    return Assumptions(**values)


def as_json(
    config: Config, hf_config: Mapping[str, Any], made: Plan | None, problems: Sequence[str], links: traffic.Request
) -> dict[str, Any]:
    found: dict[str, Any] = {"model": config.model.path, "problems": list(problems)}
    if made is not None:
        about = asdict(made)
        about["machine"] = str(made.machine)
        about["roles"] |= {"gpus": made.roles.gpus, "nodes": made.roles.nodes, "kinds": made.roles.kinds}
        about["memory"] = [
            {
                "kind": one.kind, "gpus": one.gpus, "verdict": one.verdict, "peak_phase": one.peak_phase,
                "peak": one.peak, "limit": one.limit, "margin": one.margin, "phases": one.phases,
            }
            for one in made.memory
        ]  # fmt: skip
        about["time"] = made.time and {**asdict(made.time), "step": made.time.step}
        found |= {"verdict": made.verdict, **about, "problems": list(problems)}
    if not problems or (made is not None and list(problems) == list(made.problems)):
        found["sync"] = traffic.numbers(config, hf_config, links)
    return found


def _read(request: Request) -> tuple[Config, list[str], dict[str, Any] | None, bool]:
    """The configuration, what is wrong with its file, the model, and whether it is a whole recipe."""
    target = request.target / "config.json" if (request.target / "config.json").is_file() else request.target
    if target.suffix == ".json":
        return load(CONF / "base.yaml", [f"model.path={target}", *request.overrides]), [], read_hf_config(target), False
    config, found = read(target, request.overrides)
    try:
        return config, found, read_card(str(config.model.folder)), True
    except ConfigError as error:
        if not config.model.path:
            return config, found, None, True
        return config, [*found, str(error)], None, True


def _elsewhere(request: Request, config: Config, whole: bool) -> str | None:
    """The machine to plan for, unless it is this one: where a recipe needs a GPU and none is here, its cluster's."""
    if request.on is None and whole:
        try:
            detect(config.run.device)
        except NoGpu:
            return cluster(request.target, request.overrides)[1]
    return own(request.target, request.overrides) if request.on == "own" else request.on


def _named(request: Request) -> Machine | None:
    return named(request.on) if request.on else None


def _machine(request: Request, config: Config) -> Machine:
    return _named(request) or detect(config.run.device)


def _plan(
    config: Config, hf_config: Mapping[str, Any], request: Request, assumed: Assumptions, problems: Sequence[str]
) -> Plan | None:
    """None where sizes do not go together."""
    try:
        Model.of(hf_config, Layout.from_config(config.learner)).layout.stage_layers(int(hf_config["num_hidden_layers"]))
        return plan(config, hf_config, _machine(request, config), assumed)
    except (ValueError, ConfigError):
        if not problems:
            raise
        return None
