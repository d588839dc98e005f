"""What commands that take a stored model have in common."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config import ConfigError, recorded_config

if TYPE_CHECKING:
    from megatron_rl.config.schema import Config
    from megatron_rl.workshop.evaluation.stored_model import StoredModel


def model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="a run, one of its checkpoints, a torch_dist checkpoint or a "
        "Hugging Face folder",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as eval.samples=8 data.template={}")
    parser.add_argument(
        "--format", choices=("bf16", "int8", "fp8", "fp8_block"), default="bf16", help="of the weights in the engine"
    )
    parser.add_argument("--hf", type=Path, metavar="FOLDER", help="config.json and tokenizer of a bare checkpoint")


@contextmanager
def opened(options: argparse.Namespace, *without: str) -> Iterator[tuple[Config, StoredModel]]:
    """The model that MODEL names, and how it is to be sampled, `without` what the run had; what fails is one line."""
    from megatron_rl.checkpoint.torch_dist.index import CheckpointError
    from megatron_rl.rewards.pool import RewardsHang
    from megatron_rl.sampler.protocol import SamplerError
    from megatron_rl.weight_sync.manifest import WeightSyncError
    from megatron_rl.workshop.evaluation.alone import settings
    from megatron_rl.workshop.evaluation.stored_model import find, run_of

    run = run_of(options.model)
    stored = find(options.model, recorded_config(run / "config.yaml") if run else None, options.hf)
    if stored.note:
        print(f"note: {stored.note}", file=sys.stderr)
    try:
        yield settings(run, stored, options.format, [*without, *options.overrides]), stored
    except (CheckpointError, RewardsHang, SamplerError, WeightSyncError) as error:
        raise ConfigError(str(error)) from None
