"""What commands that take a recipe have in common."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from megatron_rl.rewards.functions import RECIPE_FOLDER


def recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, help="a YAML file, such as recipes/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as correction=icepop optim.lr=1e-6")


def rewards_beside(recipe: Path) -> None:
    """Functions of the user's are looked for in the recipe's folder too."""
    os.environ[RECIPE_FOLDER] = str(recipe.resolve().parent)
