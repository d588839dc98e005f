"""Commands of `megatron-rl`: one per module, which imports its implementation when called."""

import argparse
import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_rl.config.layers import find_recipe
from megatron_rl.logs import logger
from megatron_rl.rewards.functions import RECIPE_FOLDER


def app(module: str) -> ModuleType | None:
    """A module of megatron_rl/apps/; None if that package is not installed."""
    if find_spec("megatron_rl.apps"):
        return import_module(f"megatron_rl.apps.{module}")
    return None


def command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str
) -> argparse.ArgumentParser:
    """Add a command; return the parser of its arguments."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help)
    parser.set_defaults(run=run)
    return parser


def overrides(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=help)


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recipe", type=Path, help="YAML file, or name of an installed recipe, such as quickstart"
    )
    overrides(parser, "overrides of the recipe, such as correction=icepop optim.lr=1e-6")


def folder_name(text: str) -> Path:
    """Type of an argument: a folder to write to, which no name would make the current one."""
    if not text:
        raise argparse.ArgumentTypeError("an empty name; name a folder, or . for this one")
    return Path(text)


def recipe_file(recipe: Path) -> Path:
    """Return the file of a recipe, here or installed; functions of the user's are looked for in its
    folder too.
    """
    path = find_recipe(recipe)
    if path != recipe:
        logger("recipe").info(f"{recipe} is not in this folder; using {path}")
    os.environ[RECIPE_FOLDER] = os.path.dirname(os.path.realpath(path))
    return path
