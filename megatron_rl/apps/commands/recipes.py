"""Commands about recipes, with their arguments and output: plan, translate (another project's), toy
(model and data of a small task), quickstart (makes one of five small tasks and runs it).
"""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_rl.commands import command, folder_name, overrides, recipe_file, train
from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    _add_plan(commands)
    _add_translate(commands)

    toy = command(commands, "toy", _toy, "make the toy's model folder and data")
    toy.add_argument(
        "folder",
        nargs="?",
        type=folder_name,
        default=Path("data/toy"),
        help="folder to write (default: %(default)s)",
    )
    toy.add_argument(
        "--like",
        metavar="MODEL",
        help="architecture: a model of conf/model or the hub, such as Qwen3-30B-A3B (default: Qwen3)",
    )
    toy.add_argument(
        "--tokenizer",
        metavar="FOLDER|ID|ROWS",
        help="write only model/, for your own task: tokenizer and chat template of FOLDER or ID, or made from ROWS",
    )

    quickstart = command(
        commands, "quickstart", _quickstart, "train on a small task: warm start, then RL"
    )
    tasks = ("toy", "counting", "experts", "reasoning", "tools")
    about = "toy: sums; counting: longer ones; experts: MoE; reasoning: a real task; tools: a calculator (default: toy)"
    quickstart.add_argument("--task", choices=tasks, default="toy", help=about)
    overrides(quickstart, "overrides of the RL run, such as correction=icepop")


def _add_plan(commands: Any) -> None:
    about = "estimate ranks, memory, time and weight sync of a recipe; starts nothing"
    plan = command(commands, "plan", _plan, about)
    plan.add_argument(
        "target", type=Path, metavar="RECIPE", help="a recipe, or a model's config.json"
    )
    overrides(plan, "overrides of the recipe, such as learner.tensor_parallel=8")
    plan.add_argument(
        "--on",
        metavar="NODESxGPUSxNAME-GIB-HOST",
        help="plan for this machine, such as 1x8xH100-80; own, or no GPU here: for the cluster that the recipe names",
    )
    plan.add_argument(
        "--assume", action="append", default=[], metavar="name=value", help="such as response=0.2"
    )
    plan.add_argument(
        "--json", action="store_true", dest="as_json", help="the plan as JSON, in bytes and seconds"
    )
    plan.add_argument(
        "--suggest", action="store_true", help="print the fastest layouts that fit, as overrides"
    )
    plan.add_argument(
        "--precision", action="store_true", help="print seconds of a step for each sampler format"
    )
    plan.add_argument(
        "--sbatch",
        action="store_true",
        help="print the sbatch command, for the repository's folder",
    )
    plan.add_argument(
        "--replicas", type=int, help="engines of the planned sync (default: sampler.engines)"
    )
    plan.add_argument("--link-gbs", type=float, help="GB/s of a link, to estimate sync times")


def _add_translate(commands: Any) -> None:
    about = "translate a recipe of another framework, or its correction"
    translate = command(commands, "translate", _translate, about)
    translate.add_argument(
        "framework", help="framework, such as verl, skyrl or trl; an unknown one lists all"
    )
    translate.add_argument(
        "file",
        type=Path,
        help="its YAML, TOML, script or Python file; - for YAML on standard input",
    )
    overrides(translate, "variables of a script, and keys of that framework")
    output = translate.add_mutually_exclusive_group()
    output.add_argument(
        "-o",
        type=Path,
        default=Path("-"),
        metavar="FILE",
        help="write the recipe to FILE (default: standard output)",
    )
    output.add_argument(
        "--correction", action="store_true", help="print the section correction alone"
    )


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.apps.planner.command import Request, answer

    if not options.target.exists():  # no model's folder or config.json
        options.target = recipe_file(options.target)
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
    if options.correction:
        print(translate_file(options.framework, options.file, given), end="")
    else:
        print(write_recipe(options.framework, options.file, options.o, given), end="")
    return 0


def _toy(options: argparse.Namespace) -> int:
    from megatron_rl.data import toy
    from megatron_rl.models.tiny import write_own
    from megatron_rl.preflight.downloads import fetched
    from megatron_rl.preflight.files import read_card

    like = read_card(options.like, "--like") if options.like else None
    if options.tokenizer:
        tokenizer = fetched(options.tokenizer, "--tokenizer", weights=False)
        print(write_own(options.folder, tokenizer, like))
        return 0
    counts = toy.write_toy(options.folder, like=like)
    print(
        f"{options.folder}: {counts['train']} problems to train on, {counts['test']} held out, and model/"
    )
    return 0


def _quickstart(options: argparse.Namespace) -> int:
    from megatron_rl.apps.quickstart import TASKS, quickstart

    return quickstart(options.overrides, train.run, train.check_run, TASKS[options.task])
