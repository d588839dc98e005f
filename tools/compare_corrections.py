"""Runs one recipe under several corrections, one after the other, and puts their curves side by side.

    python tools/compare_corrections.py recipes/quickstart.yaml --corrections none tis icepop \
        --steps 40 --seeds 1 2 quantization.format=fp8

Each run is `megatron-rl train RECIPE correction=NAME run.name=...` under one WANDB_RUN_GROUP. A run that fails does not
stop the next ones: it is named at the end, and the exit status is 1. Ctrl-C stops the run in progress and still
writes the report of what there is; after USR1 the run in progress finishes its step, and none follows.

    python tools/compare_corrections.py recipes/dapo_int8.yaml --corrections none tis --slurm slurm/dapo_int8.sbatch

Each run is a job then, queued by slurm/submit, which checks all of them first; a last job writes the report, once all
others have ended. `--summary` does what that job does: the table and the report of the runs that are there.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron_rl.commands.train import check_run
from megatron_rl.config import ConfigError, load
from megatron_rl.config.bounds import is_folder_name
from megatron_rl.config.schema import IfExists
from megatron_rl.processes.process import STOP_AFTER_STEP, die_with_parent, hold, lasting_output, release
from megatron_rl.rewards.own import RECIPE_FOLDER
from megatron_rl.runs.console import duration
from megatron_rl.runs.report import headline_numbers, write_report
from megatron_rl.runs.run_data import load_run
from megatron_rl.runs.run_dir import RunDir, check_run_dir
from megatron_rl.runs.status import known_status

STOP_TIMEOUT_S = 30.0  # a run stops its own children within ten seconds
INTERRUPTED = 130
NOT_STARTED = "not started"
# site lines that are empty mean: as the cluster does by itself
SBATCH = """source slurm/site.env; mkdir -p runs/slurm
for name in "${!SBATCH_@}"; do [[ -n ${!name} ]] || unset "$name"; done; exec sbatch "$@" """
TRAIN = (sys.executable, "-m", "megatron_rl.cli", "train")


@dataclass(frozen=True)
class Experiment:
    correction: str
    seed: int | None
    name: str


class Runner:
    """One child at a time. Signals to this process stop the child first."""

    def __init__(self, train: Sequence[str]) -> None:
        self._train = list(train)
        self._child: subprocess.Popen[bytes] | None = None
        self.interrupted = self.last = False
        signal.signal(STOP_AFTER_STEP, self._finish)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)

    def run(self, arguments: Sequence[str]) -> int:
        # a session of its own: the terminal's Ctrl-C reaches the child once, through _stop; it ends with this process
        end_with_us = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        hold(STOP_AFTER_STEP)
        self._child = subprocess.Popen([*self._train, *arguments], start_new_session=True, preexec_fn=end_with_us)
        release(STOP_AFTER_STEP)
        if self.interrupted:  # the signal came while the child was being started
            self._child.send_signal(signal.SIGINT)
        while self._child.poll() is None:
            if self.interrupted:
                return self._wait_stopped(self._child)
            time.sleep(0.1)
        return self._child.returncode

    def _stop(self, number: int, _frame: object) -> None:
        if self.interrupted:
            return
        self.interrupted = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)

    def _finish(self, number: int, _frame: object) -> None:
        self.last = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(number)

    @staticmethod
    def _wait_stopped(child: subprocess.Popen[bytes]) -> int:
        try:
            return child.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            return child.wait()


def plan(group: str, corrections: Sequence[str], seeds: Sequence[int]) -> list[Experiment]:
    """Seeds outermost: after every round, each correction has been seen equally often."""
    if not seeds:
        return [Experiment(name, None, f"{group}_{name}") for name in corrections]
    return [Experiment(name, seed, f"{group}_{name}_s{seed}") for seed in seeds for name in corrections]


def arguments_of(experiment: Experiment, options: argparse.Namespace, group: str) -> list[str]:
    arguments = [
        str(options.recipe),
        f"correction={experiment.correction}",
        f"run.name={experiment.name}",
        f"run.root={options.root}",
    ]
    if experiment.seed is not None:
        arguments.append(f"run.seed={experiment.seed}")
    if options.steps is not None:
        arguments.append(f"run.steps={options.steps}")
    return arguments + list(options.overrides)


def main(argv: Sequence[str], train: Sequence[str] = TRAIN) -> int:
    """`train`: the command that runs one experiment; the settings of another one than ours are its own affair."""
    options = parse(argv)
    group = options.group or f"{options.recipe.stem}_corrections"
    experiments = plan(group, options.corrections, options.seeds)
    archive = any(override.startswith("run.if_exists=archive") for override in options.overrides)
    if options.summary:
        states = {each: str(known_status(options.root / each.name).get("state", NOT_STARTED)) for each in experiments}
        summarize(experiments, states, options.root, options.output or options.root / f"{group}.html")
        return int(any(state != "finished" for state in states.values()))
    try:
        for experiment in experiments:
            check_run_dir(options.root / experiment.name, IfExists.archive if archive else IfExists.refuse)
    except ConfigError as error:
        print(f"{error}. Or choose another --group NAME", file=sys.stderr)
        return 2
    runs = [arguments_of(each, options, group) for each in experiments]
    if train is TRAIN and (found := mistakes(runs, here=options.slurm is None)):
        print("\n".join(f"error: {line}" for line in found), file=sys.stderr)
        return 2
    os.environ["WANDB_RUN_GROUP"] = group  # which W&B reads in every run
    if options.slurm:
        return queue(runs, group, options, argv)
    runner, outcomes = Runner(train), {}
    for number, experiment in enumerate(experiments, start=1):
        if runner.interrupted or runner.last:
            outcomes[experiment] = NOT_STARTED
            continue
        print(f"[{number}/{len(experiments)}] {experiment.name}", flush=True)
        begun = time.monotonic()
        status = runner.run(arguments_of(experiment, options, group))
        outcome = "finished" if status == 0 else f"failed, exit status {status}"
        outcomes[experiment] = "stopped" if runner.interrupted else outcome
        print(
            f"[{number}/{len(experiments)}] {outcomes[experiment]} in {duration(time.monotonic() - begun)}", flush=True
        )
    report = options.output or options.root / f"{group}.html"
    summarize(experiments, outcomes, options.root, report)
    if runner.interrupted:
        return INTERRUPTED
    return int(any(outcome != "finished" for outcome in outcomes.values()))


def queue(runs: Sequence[Sequence[str]], group: str, options: argparse.Namespace, argv: Sequence[str]) -> int:
    """A job for each run, and one for the report after all of them. Nothing is queued where one is refused."""
    script, given = str(options.slurm), shlex.split(options.sbatch)
    check = [sys.executable, "-m", "megatron_rl.preflight.plan.slurm", script]
    if [run for run in runs if subprocess.run([*check, *run], stdout=subprocess.DEVNULL).returncode]:
        return 2
    jobs: list[str] = []
    for recipe, *overrides in runs:
        words = ["slurm/submit", script, f"recipe={recipe}", *overrides, *given]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        queued = re.search(r"^job (\d+) is queued", done.stdout, re.M)
        if done.returncode or queued is None:
            print(
                f"error: {overrides[1]} was not queued; queued are the jobs {' '.join(jobs) or 'none'}", file=sys.stderr
            )
            return 1
        jobs.append(queued[1])
        print(f"job {queued[1]}  {overrides[1].removeprefix('run.name=')}", flush=True)
    words = [f"--dependency=afterany:{':'.join(jobs)}", f"--job-name={group}_report", "--parsable", "slurm/report.sh"]
    words += [*sys.argv[:1], *argv, "--summary"]
    done = subprocess.run(["bash", "-c", SBATCH, "sbatch", *words], stdout=subprocess.PIPE, text=True)
    print(f"job {done.stdout.strip().partition(';')[0]}  {options.output or options.root / f'{group}.html'}")
    return int(done.returncode != 0)


def mistakes(runs: Sequence[Sequence[str]], here: bool = True) -> list[str]:
    """What would end one of the runs at its start. Machine, model and data are the same for all: looked at once, where
    the runs are to be `here`."""
    found: dict[str, None] = {}
    os.environ[RECIPE_FOLDER] = str(Path(runs[0][0]).resolve().parent)
    for recipe, *overrides in runs:
        try:
            load(recipe, overrides)
        except ConfigError as error:
            found |= dict.fromkeys(str(error).splitlines())
    if here and not found:
        recipe, *overrides = runs[0]
        try:
            check_run(load(recipe, overrides))
        except ConfigError as error:
            found |= dict.fromkeys(str(error).splitlines())
    return list(found)


def summarize(experiments: Sequence[Experiment], outcomes: dict[Experiment, str], root: Path, report: Path) -> None:
    started = [e for e in experiments if outcomes[e] != NOT_STARTED]
    readable = [e for e in started if _has_metrics(root / e.name)]
    width = max(len(e.name) for e in experiments)
    for experiment in experiments:
        numbers = ""
        if experiment in readable:
            found = headline_numbers(load_run(root / experiment.name))
            wanted = ("Held-out accuracy", "Mismatch KL (k3)", "Effective sample size")
            numbers = "  ".join(f"{label} {found[label]}" for label in wanted if label in found)
        print(f"{experiment.name:<{width}}  {outcomes[experiment]:<12}  {numbers}".rstrip())
    if readable:
        write_report([root / e.name for e in readable], report)
        print(f"report {report}")
    else:
        print("no report: no run has written a line of metrics")


def _has_metrics(path: Path) -> bool:
    metrics = RunDir(path).metrics
    return metrics.is_file() and metrics.stat().st_size > 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        usage="%(prog)s RECIPE --corrections NAME [NAME ...] [options] [key=value ...]",
        description="Runs a recipe under several corrections and reports on them side by side.",
        epilog="key=value: configuration for every run, anywhere on the line",
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--corrections", nargs="+", required=True, metavar="NAME", help="presets of conf/correction")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], metavar="N", help="each correction with each seed")
    parser.add_argument("--steps", type=int, help="instead of the recipe's run.steps")
    parser.add_argument("--group", help="W&B group and start of the runs' names; RECIPE_corrections")
    parser.add_argument("--root", type=Path, default=Path("runs"), help="where run directories go (run.root)")
    parser.add_argument("-o", "--output", type=Path, help="the report; ROOT/GROUP.html")
    parser.add_argument("--slurm", type=Path, metavar="SCRIPT", help="queue each run with this batch script")
    parser.add_argument(
        "--sbatch", default="", metavar="OPTIONS", help="more options for it: --sbatch='--time=1:00:00'"
    )
    parser.add_argument("--summary", action="store_true", help="only the table and the report of runs that are there")
    overrides = [word for word in argv if "=" in word and not word.startswith("-")]
    options = parser.parse_args([word for word in argv if word not in overrides])
    options.overrides = overrides
    if not options.recipe.is_file():
        parser.error(f"recipe {options.recipe} does not exist")
    for name in ("corrections", "seeds"):
        if len(set(getattr(options, name))) != len(getattr(options, name)):
            parser.error(f"--{name} names one twice")
    group = options.group or f"{options.recipe.stem}_corrections"
    for name in (experiment.name for experiment in plan(group, options.corrections, options.seeds)):
        if not is_folder_name(name):
            parser.error(f"--group {options.group!r}: {name!r} cannot be the name of a folder")
    for override in overrides:
        if override.split("=", 1)[0] in ("run.name", "run.root", "correction"):
            parser.error(f"{override}: this tool sets that key itself; see --group, --root and --corrections")
    return options


if __name__ == "__main__":
    with lasting_output():
        sys.exit(main(sys.argv[1:]))
