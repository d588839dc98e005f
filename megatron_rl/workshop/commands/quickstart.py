"""`megatron-rl quickstart`: the whole chain on a small task."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl.commands import train


def add(commands: Any) -> None:
    quickstart = commands.add_parser("quickstart", help="a small task, a warm start, and RL on it")
    about = "counting: longer answers; reasoning: a real task"
    quickstart.add_argument("--task", choices=("toy", "counting", "reasoning"), default="toy", help=about)
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="for the RL run")
    quickstart.set_defaults(run=_quickstart)


def _quickstart(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.quickstart import TASKS, quickstart

    return quickstart(options.overrides, train.run, train.check_run, TASKS[options.task])
