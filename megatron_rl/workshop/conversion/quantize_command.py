"""`convert.py quantize`: what was asked for, as a recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Format, QuantizationSection
from megatron_rl.distributed import TorchGroup
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.workshop.conversion import as_sampler as of_run
from megatron_rl.workshop.conversion import modelopt
from megatron_rl.workshop.conversion.prompts import token_rows
from megatron_rl.workshop.conversion.quantized import Recipe, quantize_folder, weight_amax
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.weights import digest
from megatron_rl.workshop.conversion.work import refuse_target

AS_SAMPLER = "as_sampler"  # whatever the run's sampler had
FORMATS = (Format.int8.value, Format.fp8.value, Format.fp8_block.value, AS_SAMPLER, *modelopt.FORMATS)


def quantize_as_asked(
    source: Source,
    target: Path,
    note: Callable[[str], None],
    *,
    format: str,
    smooth: float | None = None,
    calibrate: str | None = None,
    ignore: Sequence[str] | None = None,
) -> None:
    """`format`: a weight format, AS_SAMPLER, or one of modelopt's."""
    refuse_target(target, [source.path, source.folder])
    if format not in FORMATS:
        why = "modelopt's export has no INT8; int8 is made here" if format == "modelopt_int8" else "there is none"
        raise ConfigError(f"--format {format}: {why}; take one of {', '.join(FORMATS)}")
    if format == AS_SAMPLER:
        if smooth is not None or calibrate or ignore:
            raise ConfigError(f"--format {AS_SAMPLER}: the run has chosen the rest; leave the other options out")
        quantize_folder(source, target, of_run.recipe_of(source), {"format": format}, note)
        return
    if format in modelopt.FORMATS:
        if smooth is not None or not calibrate:
            raise ConfigError(f"--format {format}: needs --calibrate FILE, and no --smooth")
        _refuse_for_modelopt(source, ignore or ())
        rows = token_rows(calibrate, source.folder)
        modelopt.modelopt_folder(source, target, format, rows, calibrate, ignore or (), note)
        return
    kind = Format(format)
    if (smooth is None) != (calibrate is None):
        raise ConfigError("--smooth ALPHA and --calibrate FILE belong together: smoothing follows what activations do")
    if smooth is not None and (kind != Format.int8 or not 0 < smooth < 1):
        raise ConfigError(f"--smooth {smooth} --format {kind.value}: smoothing is for int8, with 0 < ALPHA < 1")
    recipe = Recipe(kind, QuantizationSection().ignore if ignore is None else ignore)
    options: dict[str, Any] = {"format": kind.value, "ignore": list(recipe.ignore), "smooth": smooth}
    if smooth is None or calibrate is None:
        quantize_folder(source, target, recipe, options, note)
        return
    from megatron_rl.workshop.conversion.calibration import about, activation_amax

    activations_LNH, coverage = activation_amax(source, token_rows(calibrate, source.folder))
    note(f"calibrated on {calibrate}: {coverage}")
    smoothing = Smoothing(source.shape, smooth, 1, TorchGroup(), lambda: activations_LNH)
    smoothing.begin_sync(lambda: weight_amax(source.plain, source.shape, recipe))
    recipe = replace(recipe, smoothing=smoothing)
    options["scales"] = digest(smoothing.scales_LNH)
    quantize_folder(source, target, recipe, options, note, calibration=about(coverage, calibrate))


def _refuse_for_modelopt(source: Source, ignore: Sequence[str]) -> None:
    if not source.is_folder or source.quantization is not None:
        raise ConfigError(f"{source.path}: modelopt runs the model with transformers, from a plain Hugging Face folder")
    patterns = [entry for entry in ignore if entry.startswith("re:")]
    if patterns:
        raise ConfigError(f"--ignore {patterns[0]}: modelopt takes names of layers")
