"""`megatron-rl status`, `watch` and `checkpoints`: how runs stand, and what they can go on from."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
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
