"""`megatron-rl eval`: how good a stored model is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_rl.workshop.commands.stored import model_arguments, opened


def add(commands: Any) -> None:
    parser = commands.add_parser("eval", help="avg@k, pass@k and maj@k of a model on held-out sets")
    model_arguments(parser)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SET", dest="sets",
        help="a file, NAME=FILE, a preset of conf/data, or a set of the run; several times for several (default: all)",
    )  # fmt: skip
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="default: evals/MODEL-FORMAT")
    parser.set_defaults(run=_eval)


def _eval(options: argparse.Namespace) -> int:
    with opened(options) as (config, stored):
        from megatron_rl.preflight.checks import check_alone
        from megatron_rl.workshop.evaluation.measure import measure, with_sets

        config = with_sets(config, options.sets)
        folder = options.output or Path("evals") / f"{stored.label}-{options.format}"
        for note in check_alone(config, stored.weights):
            print(f"note: {note}", file=sys.stderr)
        print(measure(config, stored, folder, lambda line: print(line, file=sys.stderr, flush=True)))
        print(f"pass rates, prompt by prompt: {folder}")
    return 0
