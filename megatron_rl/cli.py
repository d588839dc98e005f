"""The command line: `megatron-rl train | plan | serve | status | watch | report | replay | rerun-step | ...`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.processes.process import STOP_AFTER_STEP, hold, lasting_output

hold(STOP_AFTER_STEP)  # until somebody can act on it: before the slower imports

from megatron_rl.config import ConfigError, cluster, load, read, to_yaml  # noqa: E402
from megatron_rl.config.schema import Config, Format  # noqa: E402
from megatron_rl.processes import slurm  # noqa: E402
from megatron_rl.rewards.own import RECIPE_FOLDER  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    return execute(_parser(), arguments)


def execute(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> int:
    with lasting_output():
        return _execute(parser, arguments)


def _execute(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> int:
    options, rest = parser.parse_known_args(arguments)
    stray = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if stray:
        parser.error(f"unknown argument {stray[0]!r}; overrides are written section.key=value")
    if rest:  # overrides after an option
        options.overrides += rest
    try:
        return options.run(options)
    except ConfigError as error:
        lines = str(error).splitlines()
        print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megatron-rl", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a recipe")
    _recipe(train)
    train.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    train.add_argument("--dry-run", action="store_true", help="check everything, print the plan, write nothing")
    train.add_argument(
        "--on",
        metavar="NODESxGPUSxNAME-GIB",
        help="with --dry-run: check for this machine, such as 1x8xH100-80; own: for the recipe's cluster",
    )
    train.add_argument(
        "--ranks",
        choices=("local", "env", "slurm"),
        default="local",
        help="local: start every rank here; env: be one rank of torchrun; slurm: be one rank of srun",
    )
    train.add_argument(
        "--attempts", type=int, default=1, metavar="N", help="start at most N times: a run that fails goes on by itself"
    )
    train.set_defaults(run=_train)

    plan = commands.add_parser("plan", help="ranks, memory, time and the sync of a recipe; starts nothing")
    plan.add_argument("target", type=Path, metavar="RECIPE", help="a recipe, or a model's config.json")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="such as learner.tensor_parallel=8")
    plan.add_argument("--on", metavar="NODESxGPUSxNAME-GIB", help="for this machine, such as 1x8xH100-80")
    plan.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="name=value",
        help="such as response=0.2",
    )
    plan.add_argument("--json", action="store_true", help="the plan as JSON, in bytes and seconds")
    plan.add_argument("--suggest", action="store_true", help="the fastest layouts that fit, as overrides")
    plan.add_argument("--sbatch", action="store_true", help="the sbatch line for it")
    plan.add_argument("--replicas", type=int, default=1, help="of the sync's links: sampler engines (default: 1)")
    plan.add_argument("--link-gbs", type=float, help="GB/s of a link, to turn bytes into seconds")
    plan.add_argument("--rows", type=int, default=5, help="how many writers and tensors to name (default: 5)")
    plan.set_defaults(run=_plan)
    serve = commands.add_parser("serve", help="one server for the fleet of a run on another machine")
    _recipe(serve)
    serve.add_argument(
        "--host", default="127.0.0.1", help="the interface to listen on; 0.0.0.0: all (default: %(default)s)"
    )
    serve.add_argument("--port", type=int, default=8000)
    serve.add_argument("--format", choices=list(map(str, Format)), help="default: quantization.format of the recipe")
    serve.set_defaults(run=_serve)

    toy = commands.add_parser("toy", help="make the toy's model folder and data")
    toy.add_argument("folder", nargs="?", type=Path, default=Path("data/toy"))
    toy.add_argument("--like", metavar="MODEL", help="of the family of this model of conf/model, such as Qwen3-30B-A3B")
    toy.set_defaults(run=_toy)

    quickstart = commands.add_parser("quickstart", help="the toy, a warm start, and RL on it")
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="for the RL run")
    quickstart.set_defaults(run=_quickstart)

    report = commands.add_parser("report", help="one HTML page from one or several run directories")
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    report.add_argument("-o", "--output", type=Path, help="default: report.html in the (first) run directory")
    report.set_defaults(run=_report)

    status = commands.add_parser("status", help="how runs stand: state, step, rate, scores, alarms, checkpoint")
    status.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    status.set_defaults(run=_status)

    watch = commands.add_parser("watch", help="the same, again and again, until all have ended")
    watch.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    watch.add_argument("--every", type=float, default=2.0, metavar="SECONDS", help="default: 2")
    watch.set_defaults(run=_watch)

    kept = commands.add_parser("checkpoints", help="what a run can go on from, and whether it is whole")
    kept.add_argument("folder", type=Path, metavar="RUN")
    kept.set_defaults(run=_checkpoints)

    replay_arguments(commands.add_parser("replay", help="other corrections on the batches that a run recorded"))

    repeat = commands.add_parser("rerun-step", help="repeats an update that was not finite, and says where it began")
    repeat.add_argument("dump", type=Path, metavar="DUMP", help="such as runs/NAME/dumps/nonfinite_12")
    repeat.set_defaults(run=_rerun_step)

    translate = commands.add_parser("translate", help="another project's correction settings as ours")
    translate.add_argument("framework", help="such as verl, skyrl or trl; an unknown one lists them all")
    translate.add_argument(
        "file", type=Path, help="their YAML: a whole run's file or the section; - for standard input"
    )
    translate.set_defaults(run=_translate)
    return parser


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s RUN --corrections NAME [NAME ...] [key=value ...]"
    parser.description = "Applies other corrections to the batches that a run recorded. Nothing is trained."
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--corrections", nargs="+", default=[], metavar="NAME", help="presets of conf/correction")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as correction.weight.high=4")
    parser.set_defaults(run=_replay)


def _recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a YAML file, such as recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as correction=icepop optim.lr=1e-6")


def _train(options: argparse.Namespace) -> int:
    if options.print_config:
        print(to_yaml(load(options.recipe, options.overrides)), end="")
        return 0
    if options.on is not None and not options.dry_run:
        raise ConfigError(f"--on {options.on}: a machine to check for, not one to run on; add --dry-run")
    os.environ[RECIPE_FOLDER] = str(options.recipe.resolve().parent)
    config, found = read(options.recipe, options.overrides)
    if not options.dry_run:
        return run(config, options.ranks, found, options.attempts)
    status = plan_run(config, found, _own_machine(options) if options.on == "own" else options.on)
    if options.ranks != "local":  # inside a job, which knows how many there will be
        _ranks_of_starter(config, options.ranks)
    return status


def _own_machine(options: argparse.Namespace) -> str:
    name, machine = cluster(options.recipe, options.overrides)
    if machine is None:
        raise ConfigError(f"--on own: cluster is {name}, which is no machine of a name; say which, such as 1x8xH100-80")
    return machine


def _serve(options: argparse.Namespace) -> int:
    config = load(options.recipe, options.overrides)
    from megatron_rl.preflight.checks import check_served
    from megatron_rl.sampler.engine_settings import EngineSettings
    from megatron_rl.sampler.fleet.serve import serve

    check_served(config.model)

    settings = EngineSettings.from_config(config).with_format(Format(options.format or config.quantization.format))
    return serve(settings, config.model.folder, options.host, options.port)


def check_run(config: Config, found: Sequence[str] = ()) -> None:
    """Everything that `run` checks before it starts or writes anything."""
    from megatron_rl.preflight.checks import check

    check(config, found)
    _check_place(config)


def plan_run(config: Config, found: Sequence[str], on: str | None) -> int:
    """What a run would do, here or on a machine that is only named."""
    from megatron_rl.preflight.checks import check
    from megatron_rl.preflight.machine import named
    from megatron_rl.preflight.summary import describe

    checked = check(config, found, named(on) if on else None)
    if on is None:
        _check_place(config)
    print(describe(config, checked))
    return 0


def run(config: Config, ranks: str = "local", found: Sequence[str] = (), attempts: int = 1) -> int:
    """Checks a configuration, then runs it; `found` are the problems that its file has by itself."""
    if attempts < 1 or (attempts > 1 and ranks != "local"):
        raise ConfigError(f"--attempts {attempts}: at least 1, and for --ranks local; a batch script queues again")
    from megatron_rl.preflight.checks import check

    checked, first = check(config, found, here=ranks == "local"), ranks == "local" or _rank(ranks) == 0
    for note in checked.notes if first else ():
        print(f"note: {note}", file=sys.stderr)
    _check_place(config, writes=first)
    from megatron_rl.launch import launch
    from megatron_rl.processes.scratch import entered
    from megatron_rl.rank import run_rank
    from megatron_rl.runs.attempts import keep_going

    if ranks == "local":
        return keep_going(launch, config, attempts, print)
    _ranks_of_starter(config, ranks)
    os.environ.update(slurm.rank_environment() if ranks == "slurm" else {})
    with entered():
        run_rank(config, Path(config.run.root) / str(config.run.name))
    return 0


def _ranks_of_starter(config: Config, ranks: str) -> None:
    """As many processes as the learner's layout has places."""
    from megatron_rl.models.layout import Layout

    name, world = "SLURM_NTASKS" if ranks == "slurm" else "WORLD_SIZE", Layout.from_config(config.learner).world
    if os.environ.get(name) != str(world):
        raise ConfigError(
            f"--ranks {ranks}: {os.environ.get(name, f'no {name}')} processes, but the product of the learner's "
            f"tensor, pipeline and data parallel sizes is {world}: ask for as many tasks, or change the sizes"
        )


def _check_place(config: Config, writes: bool = True) -> None:
    """The data can be read, and the run's directory is free: of several ranks the one that writes looks."""
    from megatron_rl.data.prompts import check_datasets
    from megatron_rl.runs.run_dir import check_run_dir

    if not writes:
        return
    check_datasets(config.model, config.data, config.rollout, config.reward)
    check_run_dir(Path(config.run.root) / str(config.run.name), config.run.if_exists, to_yaml(config))


def _rank(ranks: str) -> int:
    name = "SLURM_PROCID" if ranks == "slurm" else "RANK"
    if name not in os.environ:
        starter = "srun" if ranks == "slurm" else "torchrun"
        raise ConfigError(f"--ranks {ranks}: {name} is not set; start this under {starter}, or use --ranks local")
    return int(os.environ[name])


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.preflight.plan.command import Request, answer
    from megatron_rl.preflight.traffic import Request as Links

    os.environ[RECIPE_FOLDER] = str(options.target.resolve().parent)
    given = {name: getattr(options, name) for name in ("target", "overrides", "on", "assume", "suggest", "sbatch")}
    links = Links(options.replicas, options.link_gbs, options.rows)
    said, problems = answer(Request(**given, as_json=options.json, links=links))
    if said:
        print(said)
    if problems:
        raise ConfigError("\n".join(problems))
    return 0


def _toy(options: argparse.Namespace) -> int:
    from megatron_rl.data.toy import write_toy
    from megatron_rl.preflight.files import read_card

    counts = write_toy(options.folder, like=read_card(options.like) if options.like else None)
    print(f"{options.folder}: {counts['train']} problems to train on, {counts['test']} held out, and model/")
    return 0


def _quickstart(options: argparse.Namespace) -> int:
    from megatron_rl.quickstart import quickstart

    return quickstart(options.overrides, run, check_run)


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.runs.report import write_report

    output = options.output or options.runs[0] / "report.html"
    try:
        unread = write_report(options.runs, output)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error.strerror}; name another file with --output") from None
    print("\n".join([*(f"not readable: {problem}" for problem in unread), str(output)]))
    return 0


def _status(options: argparse.Namespace) -> int:
    from megatron_rl.runs.overview import describe

    print("\n\n".join(map(describe, options.runs)))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from megatron_rl.runs.overview import watch

    if not 0 < options.every < float("inf"):
        raise ConfigError(f"--every {options.every:g}: expected seconds above 0, such as 2")
    watch(options.runs, options.every)
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    from megatron_rl.models.kept_state import look_into
    from megatron_rl.runs.checkpoints import describe
    from megatron_rl.runs.run_dir import RunDir

    if not options.folder.is_dir():
        raise ConfigError(f"{options.folder}: no such folder; name a run directory such as runs/quickstart")
    print(describe(RunDir(options.folder).checkpoints, look_into))
    return 0


def _rerun_step(options: argparse.Namespace) -> int:
    from megatron_rl.rank import alone

    with alone():
        from megatron_rl.learner.rerun import rerun

        print(rerun(options.dump))
    return 0


def _replay(options: argparse.Namespace) -> int:
    from megatron_rl.runs.replay import replay_run

    overrides = [word for word in options.corrections if "=" in word]  # those that follow the names
    names = [word for word in options.corrections if word not in overrides]
    print(replay_run(options.folder, names, [*overrides, *options.overrides]))
    return 0


def _translate(options: argparse.Namespace) -> int:
    from megatron_rl.translation.translate import TranslationError, translate_file

    if str(options.file) != "-" and not options.file.exists():
        raise ConfigError(f"{options.file}: no such file; name a YAML file that holds the other project's keys")
    try:
        print(translate_file(options.framework, options.file), end="")
    except TranslationError as error:
        raise ConfigError(str(error)) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
