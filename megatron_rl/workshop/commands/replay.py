"""`megatron-rl replay`: other corrections on recorded batches."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    replay_arguments(commands.add_parser("replay", help="other corrections on the batches that a run recorded"))


def replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s RUN --corrections NAME [NAME ...] [key=value ...]"
    parser.description = "Applies other corrections to the batches that a run recorded. Nothing is trained."
    parser.add_argument("folder", type=Path, metavar="RUN")
    parser.add_argument("--corrections", nargs="+", default=[], metavar="NAME", help="presets of conf/correction")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as correction.weight.high=4")
    parser.set_defaults(run=_replay)


def _replay(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.comparison.replay import replay_run

    overrides = [word for word in options.corrections if "=" in word]  # those that follow the names
    names = [word for word in options.corrections if word not in overrides]
    print(replay_run(options.folder, names, [*overrides, *options.overrides]))
    return 0
