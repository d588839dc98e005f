"""`megatron-rl train`: checks a recipe, then runs it, with ranks that it starts or that srun or
torchrun started, in several attempts if requested; or prints its configuration or the documentation
of a key; or, with --dry-run, the plan of a run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megatron_rl import hub
from megatron_rl.commands import app, command, recipe_arguments, recipe_file
from megatron_rl.config import ConfigError, load, read, to_yaml
from megatron_rl.config.load import changes
from megatron_rl.config.reference import explain
from megatron_rl.config.schema import Config, Device, Recompute
from megatron_rl.logs import logger
from megatron_rl.preflight.machine import own
from megatron_rl.processes import job

if TYPE_CHECKING:
    from megatron_rl.preflight.checks import Checked
    from megatron_rl.tracking.run_dir import RunDir


def add(commands: Any) -> None:
    train = command(commands, "train", _train, "run a recipe")
    recipe_arguments(train)
    train.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and stop"
    )
    train.add_argument(
        "--explain", metavar="KEY", help="show a key's meaning, value, source and choices"
    )
    train.add_argument(
        "--dry-run",
        action="store_true",
        help="check everything, print the plan, write nothing; status 1: the data was not checked",
    )
    train.add_argument(
        "--on",
        metavar="NODESxGPUSxNAME-GIB-HOST",
        help="with --dry-run: check for this machine, such as 1x8xH100-80; own: for the cluster that the recipe names",
    )
    train.add_argument(
        "--ranks",
        choices=("local", "env", "slurm"),
        default="local",
        help="local: start all ranks here; env, slurm: be one rank of torchrun, srun (default: %(default)s)",
    )
    train.add_argument(
        "--attempts",
        type=int,
        default=1,
        metavar="N",
        help="start at most N times: a failed run resumes from its last checkpoint (default: %(default)s)",
    )


def _train(options: argparse.Namespace) -> int:
    options.recipe = recipe_file(options.recipe)
    if options.print_config:
        print(to_yaml(load(options.recipe, options.overrides)), end="")
        return 0
    if options.explain is not None:
        print(explain(options.recipe, options.overrides, options.explain or "''"))
        return 0
    if options.on is not None and not options.dry_run:
        raise ConfigError(
            f"--on {options.on}: a machine to check for, not one to run on; add --dry-run"
        )
    config, found = read(options.recipe, options.overrides)
    if not options.dry_run:
        return run(config, options.ranks, found, options.attempts)
    on = options.on
    if on == "own":
        on = own(options.recipe, options.overrides)
    edits = list(changes(options.recipe, options.overrides))
    status = plan_run(config, found, on, edits, options.ranks)
    if options.ranks != "local":  # inside a job, which knows how many there will be
        _ranks_of_starter(config, options.ranks)
    return status


def check_run(config: Config, found: Sequence[str] = ()) -> None:
    """Everything that `run` checks before it starts or writes anything."""
    from megatron_rl.preflight.downloads import with_data

    config, checked = _checked(config, found)
    _check_place(with_data(config), checked)


def plan_run(
    config: Config,
    found: Sequence[str],
    on: str | None,
    changed: Sequence[str] = (),
    ranks: str = "local",
) -> int:
    """Print the plan of a run, on this machine or a named one; return 1 if data that should be here
    was not read. `changed`: overrides of the base.
    """
    from megatron_rl.preflight import downloads
    from megatron_rl.preflight.machine import named

    if ranks == "local":
        config, to_fetch = downloads.preview(config)
        for what in to_fetch:
            print(f"fetch      {what}")
    else:
        config = downloads.from_cache(config)
    config, checked = _checked(config, found, on=named(on) if on else None)
    if on is None:
        try:
            if hub.parse(config.model.path) and not config.model.folder.is_dir():
                raise downloads.Unreachable("the tokenizer is not here")
            config = downloads.with_data(config, network=ranks == "local")
            checked = _check_place(config, checked, dry=True)
        except downloads.Unreachable as error:
            note = f"the data is not checked: {error}"
            checked = replace(checked, notes=(*checked.notes, note))
    summary = app("planner.summary")
    print(
        summary.describe(config, checked, changed)
        if summary
        else "checked: nothing prevents the run"
    )
    if on or checked.data:
        return 0
    print("the data was not checked: see the last note")
    return 1


def run(config: Config, ranks: str = "local", found: Sequence[str] = (), attempts: int = 1) -> int:
    """Check a configuration, then run it; `found`: problems already found in its file."""
    if attempts < 1 or (attempts > 1 and ranks != "local"):
        raise ConfigError(
            f"--attempts {attempts}: at least 1, and for --ranks local; a batch script queues again"
        )
    from megatron_rl.preflight import downloads

    if ranks == "local":
        config = downloads.with_small_files(config)
        to_fetch = downloads.outstanding(config)
    else:
        config = downloads.from_cache(config)
        to_fetch = []
    config, checked = _checked(config, found, here=ranks == "local")
    config = downloads.with_data(config, network=ranks == "local")
    first = ranks == "local" or _rank(ranks) == 0
    for note in _check_place(config, checked).notes if first else ():
        logger("check").warning(note)
    if to_fetch:
        downloads.fetch(to_fetch, logger("hub").info)
        _check_weights(config, checked)
    from megatron_rl.processes.scratch import entered
    from megatron_rl.rank import run_rank
    from megatron_rl.supervision.attempts import run_attempts
    from megatron_rl.supervision.launch import launch
    from megatron_rl.tracking.run_dir import RunDir

    if ranks == "local":
        return run_attempts(
            partial(launch, report=report), config, attempts, logger("launcher").warning
        )
    _ranks_of_starter(config, ranks)
    os.environ.update(job.rank_environment() if ranks == "slurm" else {})
    path = config.run.folder
    with entered():
        try:
            run_rank(config, path)
        finally:
            if first and (said := report(RunDir(path))):
                logger("launcher").info(said)
    return 0


def report(run: RunDir) -> str:
    """Write the report of a run that has ended, if the apps are installed; return its path."""
    after_run = app("reports.after_run")
    if after_run:
        return str(after_run.finish(run))
    return ""


def _checked(config: Config, found: Sequence[str], **given: Any) -> tuple[Config, Checked]:
    """Run the checks, then the plan, which needs sizes that are consistent.

    Returns the configuration as decided for this machine, without `learner.recompute: auto`.
    """
    from megatron_rl.preflight.checks import check

    checked = check(config, found, **given)
    about = checked.policy.hf_config, checked.machine
    said = ""
    if phases := app("planner.phases"):
        config, said = phases.for_machine(config, *about)
    elif config.learner.undecided:
        level = Recompute.none
        if checked.machine.kind is Device.cuda:
            level = Recompute.full
            said = "learner.recompute=auto: full, as nothing here plans memory"
        config = replace(config, learner=replace(config.learner, recompute=level))
    plan = app("planner.plan")
    if plan and (problems := plan.share_problems(config, *about)):
        raise ConfigError("\n".join(problems))
    return config, replace(checked, notes=(*checked.notes, said) if said else checked.notes)


def _check_weights(config: Config, checked: Checked) -> None:
    """Compare downloaded weights with config.json."""
    from megatron_rl.preflight.checks import refuse
    from megatron_rl.preflight.files import weights

    refuse(weights(config.model, checked.policy.shape))


def _ranks_of_starter(config: Config, ranks: str) -> None:
    """Refuse a launcher whose number of processes differs from the learner's layout."""
    from megatron_rl.models.layout import Layout

    name = "SLURM_NTASKS" if ranks == "slurm" else "WORLD_SIZE"
    world = Layout.from_config(config.learner).world
    if os.environ.get(name) != str(world):
        raise ConfigError(
            f"--ranks {ranks}: {os.environ.get(name, f'no {name}')} processes, but the product of "
            f"the learner's tensor, pipeline and data parallel sizes is {world}: ask for as many "
            "tasks, or change the sizes"
        )


def _check_place(config: Config, checked: Checked, dry: bool = False) -> Checked:
    """Check the data, the run's directory and the rewards; return `checked` with what was found."""
    from megatron_rl.data.prompts import check_datasets
    from megatron_rl.rewards.pool import Unreachable, check_called
    from megatron_rl.tracking.run_dir import RunDirectoryUsed, check_run_dir

    notes, asked, about = check_datasets(config)
    run = config.run

    @contextmanager
    def noted() -> Iterator[None]:
        """Note what refuses a run, in a dry run."""
        try:
            yield
        except (RunDirectoryUsed, Unreachable) as refused:
            if not dry:
                raise
            notes.append(f"as things stand a run would be refused: {refused}")

    with noted():
        moved = check_run_dir(run.folder, run.if_exists, to_yaml(config))
        if moved and dry:
            notes.append(moved)
    scores: list[str] = []
    if config.environment.name is None:  # else its sessions may have rewards of their own
        for one in asked:
            with noted():
                scores.append(check_called(*one, run.variables))
    return replace(
        checked, notes=(*checked.notes, *notes), data=about, scores=next(filter(None, scores), "")
    )


def _rank(ranks: str) -> int:
    name, starter = ("SLURM_PROCID", "srun") if ranks == "slurm" else ("RANK", "torchrun")
    if name not in os.environ:
        raise ConfigError(
            f"--ranks {ranks}: {name} is not set; start this under {starter}, or use --ranks local"
        )
    return int(os.environ[name])
