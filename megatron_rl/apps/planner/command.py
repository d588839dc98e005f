"""Text or JSON of `megatron-rl plan`, and the problems found: a recipe's plan and weight sync, or
in their place the answer to --suggest, --precision or --sbatch. commands/recipes.py parses the
command line, and prints.

A model's config.json in place of a recipe stands for its sync alone; with --on, --suggest or
--precision for the rest.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_rl.apps.planner import precision, slurm, suggest, table
from megatron_rl.apps.planner.case import Assumptions, Case
from megatron_rl.apps.planner.plan import Plan, plan
from megatron_rl.apps.planner.traffic import Traffic
from megatron_rl.config import ConfigError, cluster
from megatron_rl.config.load import changes, load, read
from megatron_rl.config.plain_yaml import CONF
from megatron_rl.config.schema import Config
from megatron_rl.files import JsonObject
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model, read_hf_config
from megatron_rl.models.shape import HfConfig
from megatron_rl.preflight import checks
from megatron_rl.preflight.files import read_card
from megatron_rl.preflight.machine import NoGpu, detect, named, own
from megatron_rl.preflight.sizes import size_problems


@dataclass(frozen=True, kw_only=True)
class Request:
    """Arguments of the command line, each by the name of its option."""

    target: Path  # a recipe, a config.json, or a folder that holds one
    overrides: Sequence[str] = ()
    on: str | None = None
    assume: Sequence[str] = ()  # name=value
    as_json: bool = False
    suggest: bool = False
    sbatch: bool = False
    precision: bool = False
    replicas: int | None = None  # engines that a sync goes to; None: the recipe's
    link_gbs: float | None = None  # GB/s of every link, to turn bytes into seconds


def answer(request: Request) -> tuple[str, list[str]]:
    """Text to print, and problems of the recipe."""
    config, found, hf_config, whole = _read(request)
    assumed = assumptions(request.assume)
    on = _elsewhere(request, config, whole)
    machine = named(on) if on else None
    problems = checks.problems(config, on=machine) if whole else []
    wrong = [*found, *_mistakes(request)]
    if hf_config is None or wrong:
        return "", list(dict.fromkeys([*wrong, *problems]))
    case = None
    if whole or machine or request.suggest or request.precision:
        case = Case(config, hf_config, machine or detect(config.run.device), assumed)
        if request.suggest:
            said, fits = suggest.describe(str(request.target), case)
            return said, [] if fits else [f"--suggest: {said.splitlines()[0]}"]
    if sizes := _size_problems(config, hf_config):
        return "", list(dict.fromkeys([*sizes, *problems]))
    if case and request.precision:
        return _precision(case, request.as_json), []
    sync = Traffic(config, hf_config, request.replicas or config.sampler.engines)
    about: JsonObject = {"model": config.model.path}
    texts = [sync.describe(request.link_gbs)]
    if case:
        made = plan(case)
        problems += made.problems
        if request.sbatch:
            return slurm.sbatch(request.target, request.overrides, made), problems
        about |= as_json(made)
        edits = list(changes(request.target, request.overrides)) if whole else []
        texts.insert(0, table.describe(made, edits))
    if request.as_json:
        about |= {"sync": sync.numbers(), "problems": problems}
        return json.dumps(about, indent=2), problems
    return "\n\n".join(texts), problems


def _mistakes(request: Request) -> Iterator[str]:
    if request.replicas is not None and request.replicas < 1:
        yield f"--replicas {request.replicas}: expected 1 or more"
    if request.link_gbs is not None and not 0 < request.link_gbs < math.inf:
        yield f"--link-gbs {request.link_gbs:g}: expected GB/s above 0"


def _size_problems(config: Config, hf_config: HfConfig) -> list[str]:
    try:
        model = Model.of(hf_config, Layout.from_config(config.learner))
    except ValueError as error:
        return [f"model.path={config.model.path}: {error}"]
    return size_problems(model, config.sampler, config.quantization)


def _precision(case: Case, as_json: bool) -> str:
    if as_json:
        return json.dumps([vars(row) for row in precision.rows(case)[0]], indent=2)
    return precision.describe(case)


def assumptions(given: Sequence[str]) -> Assumptions:
    """Parse the values of --assume; a name that is not known is refused."""
    known = vars(Assumptions())
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


def as_json(made: Plan) -> JsonObject:
    """The JSON of a plan, without its sync."""
    case = made.case
    roles = {name: getattr(case.roles, name) for name in ("gpus", "nodes", "kinds")}
    about: JsonObject = {
        "verdict": made.verdict,
        **asdict(made),
        "machine": str(case.machine),
        "layout": asdict(case.model.layout),
        "roles": asdict(case.roles) | roles,
        "work": asdict(case.work),
        "packs": case.packs,
        "recomputed": case.recomputed,
        "assumed": asdict(case.assumed),
    }
    del about["case"]
    reported = ("kind", "gpus", "verdict", "peak_phase", "peak", "limit", "margin", "phases")
    about["memory"] = [{name: getattr(one, name) for name in reported} for one in made.memory]
    about["time"] = made.time and {**asdict(made.time), "step": made.time.step}
    return about


def _read(request: Request) -> tuple[Config, list[str], JsonObject | None, bool]:
    """The configuration, problems of its file, the model, and whether it is a whole recipe."""
    target = request.target
    if (target / "config.json").is_file():
        target = target / "config.json"
    if target.suffix == ".json":
        config = load(CONF / "base.yaml", [f"model.path={target}", *request.overrides])
        return config, [], read_hf_config(target), False
    config, found = read(target, request.overrides)
    try:
        return config, found, read_card(config.model.folder), True
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
