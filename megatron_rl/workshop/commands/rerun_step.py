"""`megatron-rl rerun-step`: an update that was not finite, once more."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    repeat = commands.add_parser("rerun-step", help="repeats an update that was not finite, and says where it began")
    repeat.add_argument("dump", type=Path, metavar="DUMP", help="such as runs/NAME/dumps/nonfinite_12")
    repeat.set_defaults(run=_rerun_step)


def _rerun_step(options: argparse.Namespace) -> int:
    from megatron_rl.rank import alone

    with alone():
        from megatron_rl.workshop.mismatch.rerun import rerun

        print(rerun(options.dump))
    return 0
