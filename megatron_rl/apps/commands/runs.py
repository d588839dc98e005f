"""Commands about runs, with their arguments: report, status, watch, replay, done elsewhere;
checkpoints, done here. And doctor, about this machine.
"""

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.commands import command, overrides
from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    folder = "run directory, such as runs/quickstart"
    report = command(
        commands, "report", _report, "write one HTML page about one or several run directories"
    )
    report.add_argument(
        "-o", "--output", type=Path, help="default: report.html in the first run directory"
    )
    about = "print state, step, rate, scores, alarms and checkpoint of runs"
    status = command(commands, "status", _status, about)
    about = "print the status repeatedly until all runs have ended"
    watch = command(commands, "watch", _watch, about)
    watch.add_argument(
        "--every",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="interval (default: %(default)s)",
    )
    for parser in (report, status, watch):
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=folder)

    about = "list and verify the checkpoints of a run"
    kept = command(commands, "checkpoints", _checkpoints, about)
    about = "apply other corrections to the batches that a run recorded"
    replay = command(commands, "replay", _replay, about)
    for parser in (kept, replay):
        parser.add_argument("folder", type=Path, metavar="RUN", help=folder)
    replay.usage = "%(prog)s RUN --corrections NAME [NAME ...] [key=value ...]"
    replay.description = (
        "Applies other corrections to the batches that a run recorded. Nothing is trained."
    )
    replay.add_argument(
        "--corrections", nargs="+", default=[], metavar="NAME", help="presets of conf/correction"
    )
    overrides(replay, "keys of the correction, such as correction.weight.high=4")

    about = "print versions, devices, disk, network and Slurm here, and what would prevent a run"
    command(commands, "doctor", _doctor, about)


def _report(options: argparse.Namespace) -> int:
    from megatron_rl.apps.reports.report import write_report

    output = options.output or options.runs[0] / "report.html"
    try:
        unread = write_report(options.runs, output)
    except OSError as error:
        raise ConfigError(
            f"{output}: cannot be written: {error.strerror}; name another file with --output"
        ) from None
    print("\n".join([*(f"not readable: {problem}" for problem in unread), str(output)]))
    return 0


def _status(options: argparse.Namespace) -> int:
    from megatron_rl.apps.reports.overview import describe

    print("\n\n".join(map(describe, options.runs)))
    return 0


def _watch(options: argparse.Namespace) -> int:
    from megatron_rl.apps.reports.overview import watch

    if not 0 < options.every < float("inf"):
        raise ConfigError(f"--every {options.every:g}: expected seconds above 0, such as 2")
    watch(options.runs, options.every)
    return 0


def _checkpoints(options: argparse.Namespace) -> int:
    from megatron_rl.tracking.run_dir import RunDir

    if not options.folder.is_dir():
        raise ConfigError(
            f"{options.folder}: no such folder; name a run directory such as runs/quickstart"
        )
    print(_describe(RunDir(options.folder).checkpoints))
    return 0


def _describe(root: Path) -> str:
    """Table of checkpoints, newest first. Every byte is read to verify that each is complete."""
    from megatron_rl.checkpoint import checkpoints
    from megatron_rl.tracking.console import table

    rows = []
    for step in checkpoints.steps(root):
        try:
            found = checkpoints.verify(checkpoints.path_of(root, step))
            state = "complete"
        except checkpoints.IncompleteCheckpoint as error:
            rows.append((str(step), "", "", "", f"incomplete: {error}"))
            continue
        best = ""
        if found.best is not None:
            best = f"{found.best[0]} {found.best[1]:.4g}"
        rows.append((str(step), found.time, f"{found.nbytes / 1e6:.1f} MB", best, state))
    if rows:
        return "\n".join(table(("step", "saved", "size", "best", "state"), rows))
    return f"{root}: no checkpoints"


def _replay(options: argparse.Namespace) -> int:
    from megatron_rl.apps.comparison.replay import replay_run

    overrides = [word for word in options.corrections if "=" in word]  # those that follow the names
    names = [word for word in options.corrections if word not in overrides]
    print(replay_run(options.folder, names, [*overrides, *options.overrides]))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from megatron_rl.apps.nodes.doctor import doctor

    report, can_run = doctor()
    print(report)
    return 0 if can_run else 1
