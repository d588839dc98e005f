"""How the sampler of a run held the policy of one of its checkpoints: its format, and the scales of its last sync."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_rl.checkpoint.checkpoints import POLICY, SYNC
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Format, KvCache, Precision, QuantizationSection
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.hf_folder import read_stored
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.weight_files import stored_tensors
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.smoothing import SCALES_STAY, Smoothing
from megatron_rl.workshop.conversion.quantized import Recipe
from megatron_rl.workshop.conversion.sources import Source, run_config


def recipe_of(source: Source) -> Recipe:
    """ConfigError where the run's sampler held no quantized weights, or the checkpoint does not say what it had."""
    config = run_config(source)
    quantization = config.quantization
    if quantization.format == Format.none:
        raise ConfigError(f"{source.run}: its sampler held BF16 weights (quantization.format: none); use export")
    state = source.path.parent / SYNC
    if source.path.name != POLICY or not state.is_file():
        raise ConfigError(f"{source.path} is no checkpoint of a run, which alone knows its sampler: name RUN@STEP")
    read = _read(state)
    return Recipe(
        quantization.format,
        quantization.ignore,
        rounds_first=config.learner.precision is Precision.bf16,
        smoothing=_smoothing(source.shape, quantization, read),
        cache=_cache(source.shape, read) if quantization.kv_cache != KvCache.none else {},
    )


def _read(path: Path) -> dict[str, torch.Tensor]:
    return {name: read_stored(name, stored) for name, stored in stored_tensors(path).items()}


def _smoothing(
    shape: ModelShape, quantization: QuantizationSection, state: Mapping[str, torch.Tensor]
) -> Smoothing | None:
    if not quantization.smoothing or quantization.format != Format.int8:
        return None
    smoothing = Smoothing(shape, quantization.smoothing, SCALES_STAY, TorchGroup(), _nothing_new)
    smoothing.restore(state, repeats=False)
    return smoothing


def _cache(shape: ModelShape, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    scales = CacheScales(shape.layers, TorchGroup(), _nothing_new)
    scales.restore(state, repeats=False)
    return dict(scales.values())


def _nothing_new() -> torch.Tensor:
    raise AssertionError("the scales of a sync that has been are not measured again")
