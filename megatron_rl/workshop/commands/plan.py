"""`megatron-rl plan`: memory, time and traffic of a recipe, or of a model's sizes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_rl.commands.recipe import rewards_beside
from megatron_rl.config import ConfigError


def add(commands: Any) -> None:
    plan = commands.add_parser("plan", help="ranks, memory, time and the sync of a recipe; starts nothing")
    plan.add_argument("target", type=Path, metavar="RECIPE", help="a recipe, or a model's config.json")
    plan.add_argument("overrides", nargs="*", metavar="key=value", help="such as learner.tensor_parallel=8")
    plan.add_argument(
        "--on",
        metavar="NODESxGPUSxNAME-GIB",
        help="for this machine, such as 1x8xH100-80; own: the recipe's cluster, also meant where no GPU is here",
    )
    plan.add_argument(
        "--assume",
        action="append",
        default=[],
        metavar="name=value",
        help="such as response=0.2",
    )
    plan.add_argument("--json", action="store_true", help="the plan as JSON, in bytes and seconds")
    plan.add_argument("--suggest", action="store_true", help="the fastest layouts that fit, as overrides")
    plan.add_argument("--sbatch", action="store_true", help="the sbatch line for it")
    plan.add_argument("--replicas", type=int, default=1, help="of the sync's links: sampler engines (default: 1)")
    plan.add_argument("--link-gbs", type=float, help="GB/s of a link, to turn bytes into seconds")
    plan.add_argument("--rows", type=int, default=5, help="how many writers and tensors to name (default: 5)")
    plan.set_defaults(run=_plan)


def _plan(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.planner.command import Request, answer
    from megatron_rl.workshop.planner.traffic import Request as Links

    rewards_beside(options.target)
    given = {name: getattr(options, name) for name in ("target", "overrides", "on", "assume", "suggest", "sbatch")}
    links = Links(options.replicas, options.link_gbs, options.rows)
    said, problems = answer(Request(**given, as_json=options.json, links=links))
    if said:
        print(said)
    if problems:
        raise ConfigError("\n".join(problems))
    return 0
