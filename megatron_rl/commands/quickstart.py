"""`megatron-rl quickstart`: the whole chain on the toy."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_rl.commands import train


def add(commands: Any) -> None:
    quickstart = commands.add_parser("quickstart", help="the toy, a warm start, and RL on it")
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="for the RL run")
    quickstart.set_defaults(run=_quickstart)


def _quickstart(options: argparse.Namespace) -> int:
    from megatron_rl.quickstart import quickstart

    return quickstart(options.overrides, train.run, train.check_run)
