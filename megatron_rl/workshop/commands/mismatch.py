"""`megatron-rl mismatch`: where the learner and the sampler of a model come to differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.workshop.commands.stored import model_arguments, opened

UNUSED = ("data.eval=null", "eval.sets=null", "reward.name=exact_match")  # files and functions that need not be here


def add(commands: Any) -> None:
    parser = commands.add_parser("mismatch", help="where learner and sampler differ, point by point of a forward pass")
    model_arguments(parser)
    parser.add_argument("--forward", choices=("bf16", "as_sampler"), help="the learner's (default: the run's, or bf16)")
    parser.add_argument("--head", choices=("bf16", "fp32"), help="logits of both (default: the run's, or bf16)")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="for the engine to answer (default: the run's recorded rollouts, "
        "or random tokens)",
    )  # fmt: skip
    parser.add_argument("-n", "--sequences", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of each at most (default: %(default)s)")
    parser.add_argument("-o", "--out", type=Path, metavar="FOLDER", help="default: mismatch/MODEL-FORMAT-FORWARD")
    parser.set_defaults(run=_mismatch, format=None)


def _mismatch(options: argparse.Namespace) -> int:
    from megatron_rl.workshop.evaluation.stored_model import run_of

    for name, least in (("sequences", 1), ("tokens", 4)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name}: {getattr(options, name)}, expected {least} or more")
    run = run_of(options.model)
    with opened(options, *UNUSED, *_as_the_run(options, run)) as (config, stored):
        from megatron_rl.preflight.checks import check_alone, check_watched
        from megatron_rl.rank import alone

        check_alone(config, stored.weights)
        check_watched(config)
        folder = options.out or Path("mismatch") / f"{stored.label}-{options.format}-{config.learner.forward}"
        with alone():
            from megatron_rl.evaluation.sequences import Wanted
            from megatron_rl.workshop.mismatch.mismatch import measure

            wanted = Wanted(options.sequences, options.tokens, options.prompts, run)
            print(measure(config, stored, wanted, folder, lambda line: print(line, file=sys.stderr, flush=True)))
        print(f"figure and numbers: {folder}")
    return 0


def _as_the_run(options: argparse.Namespace, run: Path | None) -> list[str]:
    """Whatever the command line leaves open is as the run had it."""
    from megatron_rl.config.schema import Config
    from megatron_rl.workshop.evaluation.alone import FORMATS

    recorded = recorded_config(run / "config.yaml") if run else Config()
    names = {format: name for name, format in FORMATS.items()}
    options.format = options.format or names[recorded.quantization.format]
    if recorded.quantization.smoothing:
        print("note: the engine is served without the run's quantization.smoothing", file=sys.stderr)
    forward = options.forward or recorded.learner.forward.value
    head = options.head or recorded.model.head_precision.value
    return [
        f"learner.forward={forward}",
        f"learner.precision={recorded.learner.precision.value}",
        f"model.head_precision={head}",
    ]
