"""Which sampler a recipe asks for: the embedded engine, several of them, or a fleet of servers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_rl.sampler.embedded import EmbeddedSampler
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.fleet.sampler import FleetSampler
from megatron_rl.sampler.several import SeveralEngines


def make_sampler(
    settings: EngineSettings, hf_folder: Path, log_dir: Path, note: Callable[[str], None]
) -> EmbeddedSampler | SeveralEngines | FleetSampler:
    """Not started yet. `note` receives a line whenever an engine, or a server of the fleet, goes or comes back."""
    if settings.is_fleet:
        return FleetSampler(settings, hf_folder, log_dir, note=note)
    if settings.sampler.engines > 1:
        return SeveralEngines(settings, hf_folder, log_dir, note=note)
    return EmbeddedSampler(settings, hf_folder, log_dir, note=note)
