"""`megatron-rl toy`: the model folder and data of the toy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add(commands: Any) -> None:
    toy = commands.add_parser("toy", help="make the toy's model folder and data")
    toy.add_argument("folder", nargs="?", type=Path, default=Path("data/toy"))
    toy.add_argument("--like", metavar="MODEL", help="of the family of this model of conf/model, such as Qwen3-30B-A3B")
    toy.set_defaults(run=_toy)


def _toy(options: argparse.Namespace) -> int:
    from megatron_rl.data.toy import write_toy
    from megatron_rl.preflight.files import read_card

    counts = write_toy(options.folder, like=read_card(options.like) if options.like else None)
    print(f"{options.folder}: {counts['train']} problems to train on, {counts['test']} held out, and model/")
    return 0
