"""Which sampler a recipe asks for: embedded engines, or a fleet of servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.sampler.embedded import EmbeddedSampler
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.fleet.sampler import FleetSampler


def make_sampler(
    settings: EngineSettings, hf_folder: Path, log_dir: Path, note: Callable[[str], None]
) -> EmbeddedSampler | FleetSampler:
    """Make the sampler, not started yet. `note` receives a line whenever an engine or server goes or comes back."""
    return (FleetSampler if settings.is_fleet else EmbeddedSampler)(settings, hf_folder, log_dir, note=note)
