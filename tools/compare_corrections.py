"""Run one recipe under several corrections in sequence, and report which is best beyond the
noise of the seeds.

    python tools/compare_corrections.py recipes/quickstart.yaml --corrections none tis icepop \
        --steps 40 --seeds 1 2 quantization.format=fp8
    python tools/compare_corrections.py recipes/evidence.yaml [--subset | --full] [--write-docs]
    python tools/compare_corrections.py

The last is recipes/first_comparison.yaml, the smallest grid in which corrections differ: a few
minutes on two cores. A grid (docs/experiments/evidence.md) is a file that names a recipe, axes of overrides,
and seeds. Its runs go on where they stand: those that have finished are not run again.

Each run is `megatron-rl train RECIPE run.name=... key=value ...` under one WANDB_RUN_GROUP. All are
checked before the first starts. A run that fails does not stop the next ones: it is named at the
end, and the exit status is 1. Ctrl-C stops the runs in progress and still writes the report of what
there is; after USR1 the runs in progress finish their step, and none follows. With `--jobs N` so
many run at a time on a host, each on its share of the cores.

    python tools/compare_corrections.py recipes/dapo_int8.yaml --corrections none tis --slurm
    slurm/dapo_int8.sbatch

Each run is a job then, queued by slurm/submit, which checks all of them first; a last job writes
the report, once all others have ended. `--summary` does what that job does: the table and the
report of the runs that are there.
"""

from __future__ import annotations

from megatron_rl.processes.interrupts import leaving_at_once

with leaving_at_once():
    import argparse
    import os
    import sys
    from collections.abc import Callable, Mapping, Sequence
    from functools import partial
    from pathlib import Path

    import grid as grids
    import starts
    from comparison_pages import check_pages, write_docs
    from grid import Experiment, Grid, tags
    from jobs import queue
    from run_in_turn import FINISHED, NOT_STARTED, Job, Runner

    from megatron_rl.apps.comparison.comparison import Cell, Comparison, Result
    from megatron_rl.apps.comparison.findings import summary
    from megatron_rl.apps.comparison.page import write_comparison
    from megatron_rl.apps.comparison.wandb_runs import log_comparison
    from megatron_rl.apps.quickstart import TASKS
    from megatron_rl.apps.reports.report import headline_numbers
    from megatron_rl.apps.reports.run_data import RunData, load_run
    from megatron_rl.config import ConfigError, load, to_yaml
    from megatron_rl.config.schema import Config, Device, IfExists
    from megatron_rl.data.prompts import check_datasets
    from megatron_rl.preflight import downloads
    from megatron_rl.preflight.checks import check
    from megatron_rl.preflight.machine import detect
    from megatron_rl.processes.process import run_script
    from megatron_rl.rewards.functions import RECIPE_FOLDER
    from megatron_rl.tracking.console import duration
    from megatron_rl.tracking.run_dir import SUMMARY, RunDir, check_run_dir
    from megatron_rl.tracking.status import known_status

INTERRUPTED = 130
PAGE = Path("docs/experiments/evidence.md")
FIGURES = Path("docs/figures")
RESULTS = Path("recipes/results")
FIRST = Path("recipes/first_comparison.yaml")  # the default grid
TRAIN = (sys.executable, "-m", "megatron_rl.cli", "train")
EVALUATE = (sys.executable, "-m", "megatron_rl.cli", "eval")


def main(argv: Sequence[str], train: Sequence[str] = TRAIN) -> int:
    """`train`: the command that runs one experiment; the settings of another one than ours are its
    own affair.
    """
    options = parse(argv)
    grid = options.grid
    ours = train is TRAIN
    try:
        check_pages(options.write_docs or (), grid.group)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    experiments = grid.experiments(options.size)
    if options.summary:
        states = {
            each: str(known_status(options.root / each.name).get("state", NOT_STARTED))
            for each in experiments
        }
        summarize(grid, states, options)
        return int(any(state != FINISHED for state in states.values()))
    starts.write_data(grid)
    runs = {each: arguments_of(each, options) for each in experiments}
    try:
        done = [each for each in experiments if is_done(each, runs[each], options, ours)]
    except ConfigError as error:
        print(f"{error}. Or choose another --group NAME", file=sys.stderr)
        return 2
    if ours and (found := mistakes(options, here=options.slurm is None)):
        print("\n".join(f"error: {line}" for line in found), file=sys.stderr)
        return 2
    left = [each for each in experiments if each not in done]
    if options.dry_run:
        for each in experiments:
            print(f"{each.name}  {FINISHED if each in done else 'to run'}")
        return 0
    os.environ["WANDB_RUN_GROUP"] = grid.group  # which W&B reads in every run
    seeds = list(dict.fromkeys(each.seed for each in left))
    if options.slurm:
        return queue(left, runs, seeds, options, argv)
    runner = Runner(train, options.root / f"{grid.group}_logs", options.jobs)
    if not starts.make(grid, options.root, seeds, runner):
        return INTERRUPTED if runner.interrupted else 1
    if options.starts:
        return 0
    outcomes = dict.fromkeys(done, FINISHED) | run_all(left, runs, len(done), runner, grid.axes)
    if grid.bf16_samples and not runner.interrupted:
        evaluate_in_bf16(outcomes, grid, options, runner)
    summarize(grid, {each: outcomes[each] for each in experiments}, options)
    if runner.interrupted:
        return INTERRUPTED
    return int(any(outcome != FINISHED for outcome in outcomes.values()))


def run_all(
    left: Sequence[Experiment],
    runs: Mapping[Experiment, list[str]],
    done: int,
    runner: Runner,
    axes: Mapping[str, object],
) -> dict[Experiment, str]:
    """In turn, as many at a time as the runner takes; how each has ended."""
    total = done + len(left)
    taken = list[float]()
    places = {each.name: f"[{done + number}/{total}]" for number, each in enumerate(left, start=1)}

    def ended(job: Job, outcome: str, seconds: float) -> None:
        taken.append(seconds)
        rest = duration(sum(taken) / len(taken) * (len(left) - len(taken)) / runner.at_once)
        goes_on = len(taken) < len(left) and not (runner.interrupted or runner.last)
        after = f", about {rest} left" if goes_on else ""
        which = f"{job.name} " if runner.log_of(job.name) else ""
        print(f"{places[job.name]} {which}{outcome} in {duration(seconds)}{after}", flush=True)

    jobs = [Job(each.name, runs[each], tags(each, axes)) for each in left]
    outcomes = runner.run(
        jobs, lambda job: print(f"{places[job.name]} {runner.progress(job)}", flush=True), ended
    )
    return {each: outcomes[each.name] for each in left}


def evaluate_in_bf16(
    outcomes: Mapping[Experiment, str], grid: Grid, options: argparse.Namespace, runner: Runner
) -> None:
    """The last policies of finished runs on the held-out prompts, where that is not done yet."""
    jobs = []
    for each, outcome in outcomes.items():
        run = RunDir(options.root / each.name)
        if outcome == FINISHED and not (run.bf16_evaluation / SUMMARY).is_file():
            samples = f"eval.samples={grid.bf16_samples}"
            words = [str(run.path), samples, "--format", "bf16", "-o", str(run.bf16_evaluation)]
            jobs.append(Job(f"{each.name}_bf16", words))
    runner.command = EVALUATE
    ended = runner.run(jobs, lambda job: print(f"[bf16] {runner.progress(job)}", flush=True))
    for name, outcome in ended.items():
        if outcome != FINISHED:
            print(f"{name}: {outcome}", flush=True)


def arguments_of(
    experiment: Experiment, options: argparse.Namespace, model: Sequence[str] = ()
) -> list[str]:
    """`model`: in the place of the warm start's."""
    grid = options.grid
    if grid.task is not None and not model:
        model = [f"model.path={starts.model_of(grid, options.root, experiment.seed)}"]
    arguments = [
        str(grid.recipe),
        *options.first,
        *model,
        *experiment.overrides,
        f"run.name={experiment.name}",
    ]
    arguments.append(f"run.root={options.root}")
    if options.steps is not None:
        arguments.append(f"run.steps={options.steps}")
    return arguments + list(options.overrides)


def is_done(
    experiment: Experiment, arguments: Sequence[str], options: argparse.Namespace, ours: bool
) -> bool:
    """Return True if a resumable run has finished; raise where its folder is taken."""
    given = [word.partition("=")[2] for word in arguments if word.startswith("run.if_exists=")]
    if_exists = next((one for one in IfExists if given and one == given[-1]), IfExists.refuse)
    path = options.root / experiment.name
    if ours and if_exists is IfExists.resume:
        config = _loaded(arguments)
    else:
        config = None
    check_run_dir(path, if_exists, _resolved(config) if config else "")
    if if_exists is not IfExists.resume:
        return False
    status = known_status(path)
    return status.get("state") == FINISHED and (
        config is None or status.get("steps") == config.run.steps
    )


def _loaded(arguments: Sequence[str]) -> Config | None:
    """Return None for a recipe that cannot be loaded; the reason is in `mistakes`."""
    try:
        return load(arguments[0], arguments[1:])
    except ConfigError:
        return None


def _resolved(config: Config) -> str:
    """Return the configuration with the commits of its run; "" if they are not in the cache."""
    try:
        return to_yaml(downloads.with_data(downloads.from_cache(config), network=False))
    except ConfigError:
        return ""


def mistakes(options: argparse.Namespace, here: bool = True) -> list[str]:
    """Errors that would end one of the runs at its start, a warm start included. Machine and files
    are checked where the runs are to be `here`, the data once: it is the same for all. What they
    take from the hub is printed and downloaded once: the weights last, and not for a dry run.
    """
    grid = options.grid
    os.environ[RECIPE_FOLDER] = os.path.dirname(os.path.realpath(grid.recipe))
    experiments = grid.experiments(options.size)
    found: dict[str, None] = {}
    configs: list[Config] = []
    model: list[str] = []

    def attempt(step: Callable[[], object]) -> None:
        try:
            step()
        except ConfigError as error:
            found.update(dict.fromkeys(str(error).splitlines()))

    def load_warm_start() -> None:
        # the model of the runs is still to come: the one that it begins with has the same shape
        overrides = starts.arguments(grid, options.root, experiments[0].seed)[1:]
        configs.append(load(TASKS[grid.task].warm_start, overrides))
        init = configs[-1].model
        model.extend((f"model.path={init.path}", f"model.init={init.init}"))

    def load_run_of(experiment: Experiment) -> None:
        recipe, *overrides = arguments_of(experiment, options, model)
        configs.append(load(recipe, overrides))

    if grid.task is not None:
        attempt(load_warm_start)
    for experiment in experiments:
        attempt(partial(load_run_of, experiment))

    def download_all_but_weights() -> None:
        previews = [downloads.preview(config) for config in configs]
        for what in dict.fromkeys(line for _, lines in previews for line in lines):
            print(f"fetch      {what}", flush=True)
        configs[:] = [downloads.with_data(config) for config, _ in previews]

    def download_weights() -> None:
        for config in configs:
            downloads.fetch(downloads.outstanding(config), partial(print, flush=True))

    if not found and here:
        attempt(download_all_but_weights)
    if found or not here:
        return list(found)
    for config in configs:
        attempt(partial(check, config))
    if not found and options.jobs > 1 and detect(config.run.device).kind == Device.cuda:
        found["--jobs: runs on one machine would share the memory of its GPUs; leave it out"] = None
    if not found:
        attempt(partial(check_datasets, config))
    if not found and not options.dry_run:
        attempt(download_weights)
    return list(found)


def summarize(grid: Grid, outcomes: Mapping[Experiment, str], options: argparse.Namespace) -> None:
    """A line for each run, what they say together, and the page; with W&B the same there; in the
    docs where asked.
    """
    root = options.root
    runs = {
        e: load_run(root / e.name)
        for e in outcomes
        if outcomes[e] != NOT_STARTED and _has_metrics(root / e.name)
    }
    width = max(len(e.name) for e in outcomes)
    for experiment, outcome in outcomes.items():
        numbers = ""
        if experiment in runs:
            found = headline_numbers(runs[experiment])
            wanted = (
                "Held-out accuracy",
                "Median mismatch KL (k3)",
                "Median effective sample size",
            )
            numbers = "  ".join(f"{label} {found[label]}" for label in wanted if label in found)
        print(f"{experiment.name:<{width}}  {outcome:<12}  {numbers}".rstrip())
    if not runs:
        print("no report: no run has written a line of metrics")
        return
    comparison = compared(grid, outcomes, runs)
    print("\n".join(summary(comparison)))
    write_comparison(comparison, list(runs.values()), options.output)
    print(f"report {options.output}")
    if options.write_docs is not None:
        for path in write_docs(comparison, options.write_docs, FIGURES, RESULTS):
            print(f"wrote  {path}")
    if where := log_comparison(comparison, list(runs.values()), root / f"{grid.group}_comparison"):
        print(f"wandb  {where}")


def compared(
    grid: Grid, outcomes: Mapping[Experiment, str], runs: Mapping[Experiment, RunData]
) -> Comparison:
    cells: dict[tuple[str, ...], list[Result]] = {}
    for each, outcome in outcomes.items():
        if each in runs:
            result = Result.of(runs[each], each.seed)
        else:
            result = Result(each.name, each.seed, outcome)
        cells.setdefault(each.labels, []).append(result)
    return Comparison(
        grid.group,
        tuple(grid.axes),
        tuple(Cell(labels, tuple(results)) for labels, results in cells.items()),
        grid.reference,
    )


def _has_metrics(path: Path) -> bool:
    metrics = RunDir(path).metrics
    return metrics.is_file() and metrics.stat().st_size > 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        usage="%(prog)s [GRID] [options] [key=value ...]\n"
        "       %(prog)s RECIPE --corrections NAME [NAME ...] [options] [key=value ...]",
        description="Runs a recipe under several corrections and reports on them side by side.",
        epilog="key=value: configuration for every run, anywhere on the line",
    )
    parser.add_argument(
        "recipe",
        nargs="?",
        type=Path,
        default=FIRST,
        help=f"a recipe, or a grid such as recipes/evidence.yaml; {FIRST}",
    )
    parser.add_argument(
        "--corrections", nargs="+", metavar="NAME", help="presets of conf/correction"
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="each correction with each seed",
    )
    parser.add_argument("--steps", type=int, help="instead of the recipe's run.steps")
    parser.add_argument(
        "--group",
        help="W&B group and start of the runs' names; RECIPE_corrections, or the grid's stem",
    )
    parser.add_argument(
        "--root", type=Path, default=Path("runs"), help="where run directories go (run.root)"
    )
    parser.add_argument("-o", "--output", type=Path, help="the report; ROOT/GROUP.html")
    size = parser.add_mutually_exclusive_group()
    for name, about in (("subset", "the grid's few cells"), ("full", "all of its cells")):
        size.add_argument(
            f"--{name}",
            dest="size",
            action="store_const",
            const=name,
            default="default",
            help=about,
        )
    parser.add_argument(
        "--dry-run", action="store_true", help="check all runs, list them, start none"
    )
    parser.add_argument("--starts", action="store_true", help="only the warm starts of a grid")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="runs at a time, each on cores of its own"
    )
    parser.add_argument(
        "--slurm", type=Path, metavar="SCRIPT", help="queue each run with this batch script"
    )
    parser.add_argument(
        "--sbatch",
        default="",
        metavar="OPTIONS",
        help="more options for it: --sbatch='--time=1:00:00'",
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="only the table and the report of runs that are there",
    )
    parser.add_argument(
        "--write-docs",
        nargs="*",
        type=Path,
        metavar="PAGE",
        help="write the numbers into pages; docs/GROUP.md",
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = make_parser()
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in argv if word not in overrides])
    options.overrides = overrides
    _choose_grid(options, parser)
    cores = len(os.sched_getaffinity(0))
    if not 1 <= options.jobs <= cores:
        parser.error(f"--jobs {options.jobs}: expected 1 to {cores}, the cores of this machine")
    if options.slurm and options.jobs > 1:
        parser.error("--jobs: with --slurm each run is a job of its own; leave it out")
    group = options.grid.group
    options.output = options.output or options.root / f"{group}.html"
    if options.write_docs == []:
        options.write_docs = [PAGE]
    mine = {"run.name", "run.root", *options.grid.axes}
    if options.grid.seeds:
        mine.add("run.seed")
    for override in overrides:
        if override.partition("=")[0] in mine:
            parser.error(f"{override}: see --group, --root, --seeds and --corrections")
    return options


def _choose_grid(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """`first`: overrides below all others. The runs of a grid resume."""
    if not options.recipe.is_file():
        parser.error(f"recipe {options.recipe} does not exist")
    if grids.is_grid(options.recipe):
        if options.corrections:
            parser.error(
                "--corrections: a grid has its own, as an axis; leave it out, or give the grid's "
                "recipe"
            )
        try:
            options.grid = grids.read(options.recipe, options.group, options.seeds)
        except ConfigError as error:
            parser.error(str(error))
        options.first = ["run.if_exists=resume"]
        return
    if not options.corrections:
        parser.error(
            f"--corrections: {options.recipe} is a recipe, without axes; name some, such as none "
            f"tis; or name {FIRST}"
        )
    if options.size != "default" or options.starts:
        parser.error(
            "--subset, --full, --starts: those of a grid; choose with --corrections, --seeds and "
            "--steps"
        )
    group = options.group or f"{options.recipe.stem}_corrections"
    options.grid = grids.of_corrections(options.recipe, group, options.corrections, options.seeds)
    options.first = []


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1:]))
