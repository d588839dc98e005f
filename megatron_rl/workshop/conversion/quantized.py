"""`tools/convert.py quantize`: plain weights -> those that a sync would send an engine, bit for
bit, or modelopt's.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.checkpoints import POLICY, SYNC
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.bounds import are_modules
from megatron_rl.config.schema import Format, KvCache, Precision, QuantizationSection
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.hf_folder import read_stored
from megatron_rl.models.mapping import Param, params, stored_params
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.models.weight_files import companions, stored_tensors
from megatron_rl.quantization import formats
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.quantize import quantize
from megatron_rl.quantization.smoothing import SCALES_STAY, Smoothing, column_amax
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.conversion import calibration
from megatron_rl.workshop.conversion.exports import Beside, write_folder
from megatron_rl.workshop.conversion.sources import Get, Source, Weights, of_folder
from megatron_rl.workshop.conversion.verification import compare
from megatron_rl.workshop.conversion.work import begun, refuse_target

# of what stays unquantized; what a learner in BF16 quantizes is rounded to it before
DTYPE = "bfloat16"
AS_SAMPLER = "as_sampler"  # whatever the run's sampler had
FORMATS = (
    Format.int8.value,
    Format.fp8.value,
    Format.fp8_block.value,
    AS_SAMPLER,
    *calibration.MODELOPT,
)


@dataclass(frozen=True)
class Recipe:
    """The way from weights to those of an engine."""

    format: Format
    ignore: Sequence[str] = ()
    rounds_first: bool = True  # False: a learner that holds its weights in FP32 quantizes those
    smoothing: Smoothing | None = None
    # scales of an FP8 cache, by name
    cache: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def quantizes(self, name: str) -> bool:
        return formats.is_quantized(name, self.format, self.ignore)

    def rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.rounds_first:
            return tensor.to(torch_dtype(DTYPE))
        return tensor


def quantize_as_asked(
    source: Source,
    target: Path,
    *,
    format: str,
    smooth: float | None = None,
    calibrate: str | None = None,
    ignore: Sequence[str] | None = None,
) -> None:
    """`format`: a weight format, AS_SAMPLER, or one of modelopt's."""
    refuse_target(target, [source])
    if format not in FORMATS:
        if format == "modelopt_int8":
            why = "modelopt's export has no INT8; int8 is made here"
        else:
            why = "there is none"
        raise ConfigError(f"--format {format}: {why}; take one of {', '.join(FORMATS)}")
    if not are_modules(ignore or ()):
        raise ConfigError(
            f"--ignore {' '.join(ignore or ())}: no regular expression stands after re:"
        )
    if format == AS_SAMPLER:
        if smooth is not None or calibrate or ignore:
            raise ConfigError(
                f"--format {AS_SAMPLER}: the run has chosen the rest; leave the other options out"
            )
        _quantize_folder(source, target, _recipe_of_run(source))
        return
    if format in calibration.MODELOPT:
        if smooth is not None or not calibrate:
            raise ConfigError(f"--format {format}: needs --calibrate FILE, and no --smooth")
        _modelopt_folder(source, target, format, calibrate, ignore or ())
        return
    kind = Format(format)
    if (smooth is None) != (calibrate is None):
        raise ConfigError(
            "--smooth ALPHA and --calibrate FILE belong together: smoothing follows what "
            "activations do"
        )
    if smooth is not None and (kind != Format.int8 or not 0 < smooth < 1):
        raise ConfigError(
            f"--smooth {smooth} --format {kind.value}: smoothing is for int8, with 0 < ALPHA < 1"
        )
    recipe = Recipe(kind, QuantizationSection().ignore if ignore is None else ignore)
    if smooth is None or calibrate is None:
        _quantize_folder(source, target, recipe)
        return
    activations_LNH, coverage = calibration.activation_amax(source, calibrate)
    smoothing = Smoothing(source.shape, smooth, 1, TorchGroup(), lambda: activations_LNH)
    smoothing.begin_sync(lambda: _weight_amax(source.plain, source.shape, recipe))
    _quantize_folder(source, target, replace(recipe, smoothing=smoothing), calibration=coverage)


def _modelopt_folder(
    source: Source, target: Path, format: str, calibrate: str, ignore: Sequence[str]
) -> None:
    """ValueError where a tensor of the result is further from the plain one than the format's
    rounding.
    """
    if not source.is_folder or source.quantization is not None:
        raise ConfigError(
            f"{source.path}: modelopt runs the model with transformers, from a plain Hugging Face "
            "folder"
        )
    if patterns := [entry for entry in ignore if entry.startswith("re:")]:
        raise ConfigError(f"--ignore {patterns[0]}: modelopt takes names of layers")
    rows = calibration.token_rows(calibrate, source.folder)
    with begun(target, "quantize", [source], {}) as work:
        seen = calibration.export_by_modelopt(source, work.path, format, rows, ignore)
        coverage = calibration.coverage(calibrate, rows, seen)
        for name in companions(source.folder):
            if not (work.path / name).exists():
                shutil.copyfile(source.folder / name, work.path / name)
        for one in compare(source, Source(work.path, work.path, read_hf_config(work.path))):
            if not one.ok:
                raise ValueError(
                    f"modelopt's export of {one.name} is not the weight that went in: {one.said}"
                )
        work.publish(of_folder(work.path), format=format, calibration=coverage)


def _recipe_of_run(source: Source) -> Recipe:
    """The way in which a run's sampler held a checkpoint's policy: its format, the scales of its
    last sync.

    ConfigError where the run's sampler held no quantized weights, or the checkpoint does not say
    what it had.
    """
    if source.run is None:
        raise ConfigError(f"{source.path} belongs to no run")
    config = recorded_config(RunDir(source.run).config)
    quantization = config.quantization
    if quantization.format == Format.none:
        raise ConfigError(
            f"{source.run}: its sampler held BF16 weights (quantization.format: none); use export"
        )
    state = source.path.parent / SYNC
    if source.path.name != POLICY or not state.is_file():
        raise ConfigError(
            f"{source.path} is no checkpoint of a run, which alone knows its sampler: name RUN@STEP"
        )
    held = {name: read_stored(name, stored) for name, stored in stored_tensors(state).items()}
    smoothing = None
    cache = dict[str, torch.Tensor]()
    if quantization.smoothing and quantization.format == Format.int8:
        smoothing = Smoothing(
            source.shape, quantization.smoothing, SCALES_STAY, TorchGroup(), _nothing_new
        )
        smoothing.restore(held, repeats=False)
    if quantization.kv_cache != KvCache.none:
        scales = CacheScales(source.shape.layers, TorchGroup(), _nothing_new)
        scales.restore(held, repeats=False)
        cache = dict(scales.values())
    rounds_first = config.learner.precision is Precision.bf16
    return Recipe(quantization.format, quantization.ignore, rounds_first, smoothing, cache)


def _nothing_new() -> torch.Tensor:
    raise AssertionError("the scales of a sync that has been are not measured again")


def _quantize_folder(source: Source, target: Path, recipe: Recipe, **about: Any) -> None:
    """Write the quantized folder. `about`: for parity.json."""
    plain = source.plain
    shape = source.shape
    source.refuse_misfits()
    layout = formats.quantization_config(
        recipe.format, recipe.ignore, KvCache.fp8 if recipe.cache else KvCache.none
    )
    key = "dtype" if "dtype" in source.hf_config else "torch_dtype"
    beside = Beside(source.folder, {"quantization_config": layout, key: DTYPE})
    made = _quantized(plain, shape, recipe)
    write_folder(made, target, beside, "quantize", [source], format=recipe.format.value, **about)


def _quantized(weights: Weights, shape: ModelShape, recipe: Recipe) -> Weights:
    """`weights`: plain ones, of a whole model; what no model has is left out."""
    behind = {name: param for param in stored_params(shape) for name in param.hf}
    specs: dict[str, TensorSpec] = {}
    source: dict[str, str] = {}  # output -> what it is made of
    for name in behind:
        made = {spec.name: spec for spec in _specs(weights.specs[name], recipe)}
        specs |= made
        source |= dict.fromkeys(made, name)
    specs |= {name: TensorSpec.of(name, scale) for name, scale in recipe.cache.items()}

    def opened() -> Get:
        get = weights.open()
        held = dict[str, torch.Tensor]()

        def made(name: str) -> torch.Tensor:
            if name in recipe.cache:
                return recipe.cache[name]
            if name not in held:
                held.clear()
                held.update(_made(source[name], get(source[name]), behind[source[name]], recipe))
            return held[name]

        return made

    return Weights(specs, opened)


def _specs(spec: TensorSpec, recipe: Recipe) -> list[TensorSpec]:
    if not recipe.quantizes(spec.name):
        return [TensorSpec(spec.name, DTYPE, spec.shape)]
    kind = formats.QUANTIZED[recipe.format]
    rows, columns = spec.shape
    name = formats.scale_name(spec.name)
    shape = formats.scale_shape(rows, columns, kind.blocks)
    return [
        TensorSpec(spec.name, kind.dtype, spec.shape),
        TensorSpec(name, formats.SCALE_DTYPE, shape),
    ]


def _made(name: str, tensor: torch.Tensor, param: Param, recipe: Recipe) -> dict[str, torch.Tensor]:
    tensor = recipe.rounded(tensor)
    if recipe.smoothing is not None:
        tensor = recipe.smoothing.fold(param, tensor)
    if not recipe.quantizes(name):
        return {name: tensor.to(torch_dtype(DTYPE))}
    try:
        result = quantize(tensor, recipe.format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {name: result["weight"], formats.scale_name(name): result["weight_scale"]}


def _weight_amax(weights: Weights, shape: ModelShape, recipe: Recipe) -> torch.Tensor:
    """[layer, norm, channel]: the largest weight of each column over the quantized readers of a
    norm.
    """
    amax_LNH = torch.zeros(shape.layers, len(Norm), shape.hidden)
    get = weights.open()
    for param in params(shape):
        if param.row.norm is None or param.layer is None or len(param.shapes[0]) == 1:
            continue
        here = amax_LNH[param.layer, param.row.norm]
        for name in filter(recipe.quantizes, param.hf):
            torch.maximum(here, column_amax(recipe.rounded(get(name))), out=here)
    return amax_LNH
