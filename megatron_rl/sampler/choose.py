"""Which sampler a recipe asks for: the embedded engine, or a fleet of servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.config.fleet import is_fleet
from megatron_rl.config.schema import Config
from megatron_rl.sampler.embedded import EmbeddedSampler
from megatron_rl.sampler.fleet.fleet import FleetSampler


def make_sampler(
    config: Config, hf_folder: Path, log_dir: Path, say: Callable[[str], None]
) -> EmbeddedSampler | FleetSampler:
    """Not started yet. `say` receives what becomes of a fleet's servers."""
    if is_fleet(config.sampler):
        return FleetSampler(config, hf_folder, log_dir, say=say)
    return EmbeddedSampler(config, hf_folder, log_dir)
