"""Commands of `megatron-rl`: one per module, which imports its implementation when called."""

import argparse
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from megatron_rl.rewards.functions import RECIPE_FOLDER


def workshop(module: str) -> ModuleType | None:
    """A module of megatron_rl/workshop/; None if that package is not installed."""
    if find_spec("megatron_rl.workshop"):
        return import_module(f"megatron_rl.workshop.{module}")
    return None


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a YAML file, such as recipes/quickstart.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as correction=icepop optim.lr=1e-6"
    )


def folder_name(text: str) -> Path:
    """Type of an argument: a folder to write to, which no name would make the current one."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; name a folder, or . for this one")
    return Path(text)


def rewards_beside(recipe: Path) -> None:
    """Functions of the user's are looked for in the recipe's folder too."""
    os.environ[RECIPE_FOLDER] = os.path.dirname(os.path.realpath(recipe))
