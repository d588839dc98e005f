"""Commands about recipes, with their arguments and output: plan, translate (another project's), toy
(model and data of a small task), quickstart (makes one of five small tasks and runs it).
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_rl.commands import command, folder_name, overrides, rewards_beside, train
from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    _add_plan(commands)
    _add_translate(commands)

    toy = command(commands, "toy", _toy, "make the toy's model folder and data")
    toy.add_argument("folder", nargs="?", type=folder_name, default=Path("data/toy"))
    toy.add_argument(
        "--like",
        metavar="MODEL",
        help="of the family of this model of conf/model, such as Qwen3-30B-A3B",
    )
    own = "model/ alone, for a task of one's own: a folder with tokenizer and chat template, or rows to make one of"
    toy.add_argument("--tokenizer", type=Path, metavar="FOLDER|ROWS", help=own)

    quickstart = command(
        commands, "quickstart", _quickstart, "a small task, a warm start, and RL on it"
    )
    tasks = ("toy", "counting", "experts", "reasoning", "tools")
    about = "counting: longer answers; experts: a mixture; reasoning: a real task; tools: a calculator to call"
    quickstart.add_argument("--task", choices=tasks, default="toy", help=about)
    overrides(quickstart, "for the RL run")


def _add_plan(commands: Any) -> None:
    about = "ranks, memory, time and the sync of a recipe; starts nothing"
    plan = command(commands, "plan", _plan, about)
    plan.add_argument(
        "target", type=Path, metavar="RECIPE", help="a recipe, or a model's config.json"
    )
    overrides(plan, "such as learner.tensor_parallel=8")
    plan.add_argument(
        "--on",
        metavar="NODESxGPUSxNAME-GIB-HOST",
        help="for this machine, such as 1x8xH100-80; own: the recipe's cluster, also meant where no GPU is here",
    )
    plan.add_argument(
        "--assume", action="append", default=[], metavar="name=value", help="such as response=0.2"
    )
    plan.add_argument(
        "--json", action="store_true", dest="as_json", help="the plan as JSON, in bytes and seconds"
    )
    plan.add_argument(
        "--suggest", action="store_true", help="the fastest layouts that fit, as overrides"
    )
    plan.add_argument(
        "--precision",
        action="store_true",
        help="seconds of a step by the sampler's format; what pays",
    )
    plan.add_argument("--sbatch", action="store_true", help="the sbatch line for it")
    plan.add_argument(
        "--replicas", type=int, default=1, help="of the sync's links: sampler engines (default: 1)"
    )
    plan.add_argument("--link-gbs", type=float, help="GB/s of a link, to turn bytes into seconds")


def _add_translate(commands: Any) -> None:
    about = "another project's recipe, or its correction alone, as ours"
    translate = command(commands, "translate", _translate, about)
    translate.add_argument(
        "framework", help="such as verl, skyrl or trl; an unknown one lists them all"
    )
    translate.add_argument(
        "file",
        type=Path,
        help="their YAML, TOML, script or Python file; - for YAML on standard input",
    )
    overrides(translate, "variables of a script, and keys of theirs")
    translate.add_argument(
        "-o", type=Path, metavar="FILE", help="write the whole recipe there; - for standard output"
    )


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.apps.planner.command import Request, answer

    rewards_beside(options.target)
    said, problems = answer(
        Request(**{field.name: getattr(options, field.name) for field in fields(Request)})
    )
    if said:
        print(said)
    if problems:
        raise ConfigError("\n".join(problems))
    return 0


def _translate(options: argparse.Namespace) -> int:
    from megatron_rl.apps.translation.recipe import write_recipe
    from megatron_rl.apps.translation.translate import translate_file

    given: dict[str, str] = {}
    for item in options.overrides:
        name, sign, value = item.partition("=")
        if not sign:
            raise ConfigError(f"{item!r}: a variable or a key is given as name=value")
        if given.setdefault(name, value) != value:
            raise ConfigError(
                f"{item!r}: {name} is given as {given[name]} too; leave one of the two out"
            )
    if options.o is None:
        print(translate_file(options.framework, options.file, given), end="")
    else:
        print(write_recipe(options.framework, options.file, options.o, given), end="")
    return 0


def _toy(options: argparse.Namespace) -> int:
    from megatron_rl.data import toy
    from megatron_rl.models.tiny import write_own
    from megatron_rl.preflight.files import read_card

    like = read_card(options.like, "--like") if options.like else None
    if options.tokenizer:
        print(write_own(options.folder, options.tokenizer, like))
        return 0
    counts = toy.write_toy(options.folder, like=like)
    print(
        f"{options.folder}: {counts['train']} problems to train on, {counts['test']} held out, and "
        "model/"
    )
    return 0


def _quickstart(options: argparse.Namespace) -> int:
    from megatron_rl.apps.quickstart import TASKS, quickstart

    return quickstart(options.overrides, train.run, train.check_run, TASKS[options.task])
