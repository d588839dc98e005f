"""Command about an installation, with its argument and output: constraints."""

import argparse
from typing import Any

from megatron_rl.commands import command
from megatron_rl.config.plain_yaml import PACKAGE


def add(commands: Any) -> None:
    about = "print the tested versions of dependencies, for --constraints of pip and uv"
    constraints = command(commands, "constraints", _constraints, about)
    constraints.add_argument(
        "set",
        choices=("cpu", "gpu", "overrides-cpu", "overrides-gpu"),
        metavar="cpu|gpu|overrides-cpu|overrides-gpu",
        help="set of packages; overrides-...: replaced requirements, for --overrides of uv",
    )


def _constraints(options: argparse.Namespace) -> int:
    print((PACKAGE / "constraints" / f"{options.set}.txt").read_text(encoding="utf-8"), end="")
    return 0
