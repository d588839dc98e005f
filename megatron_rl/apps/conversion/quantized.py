"""`tools/convert.py quantize`: weights as a sync sends them, bit for bit, or modelopt's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from megatron_rl.apps.conversion.exports import DTYPE, Beside, plain_dtype, write_folder
from megatron_rl.apps.conversion.modelopt import MODELOPT, quantize_by_modelopt
from megatron_rl.apps.conversion.sources import Get, Source, Weights
from megatron_rl.apps.conversion.work import refuse_target
from megatron_rl.checkpoint.checkpoints import POLICY, SYNC
from megatron_rl.config import ConfigError, recorded_config
from megatron_rl.config.bounds import are_modules
from megatron_rl.config.schema import Format, KvCache, Precision, QuantizationSection
from megatron_rl.distributed import TorchGroup
from megatron_rl.models.hf_folder import read_stored
from megatron_rl.models.mapping import Param, stored_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import TensorSpec, torch_dtype
from megatron_rl.models.weight_files import stored_tensors
from megatron_rl.quantization import formats
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.quantize import quantize
from megatron_rl.quantization.smoothing import SCALES_STAY, Smoothing
from megatron_rl.tracking.run_dir import RunDir

AS_SAMPLER = "as_sampler"  # the format of the run's sampler


@dataclass(frozen=True)
class Recipe:
    """The way from weights to those of an engine."""

    format: Format
    ignore: Sequence[str] = ()
    rounds_first: bool = True  # False: a learner that holds its weights in FP32 quantizes those
    smoothing: Smoothing | None = None
    # scales of an FP8 cache, by name
    cache: Mapping[str, Tensor] = field(default_factory=dict)

    def quantizes(self, name: str) -> bool:
        return formats.is_quantized(name, self.format, self.ignore)


def quantize_folder(
    source: Source,
    target: Path,
    *,
    format: str,
    calibrate: str | None = None,
    ignore: Sequence[str] | None = None,
) -> None:
    """`format`: a weight format, AS_SAMPLER, or one of modelopt's."""
    refuse_target(target, [source])
    if not are_modules(ignore or ()):
        raise ConfigError(f"--ignore: no regular expression after re: in {ignore}")
    if (calibrate is not None) != (format in MODELOPT):
        raise ConfigError(f"--format {format}: --calibrate belongs to the formats of modelopt")
    if calibrate is not None:
        quantize_by_modelopt(source, target, format, calibrate, ignore or ())
        return
    if format != AS_SAMPLER:
        recipe = Recipe(Format(format), QuantizationSection().ignore if ignore is None else ignore)
    elif ignore:
        raise ConfigError(f"--format {AS_SAMPLER}: the run's own ignore holds; leave --ignore out")
    else:
        recipe = _recipe_of_run(source)
    _write(source, target, recipe)


def _recipe_of_run(source: Source) -> Recipe:
    """Quantization of a policy in its run's sampler: its format and the last sync's scales.

    ConfigError if the run's sampler was not quantized, or the scales were not recorded.
    """
    state = source.path.parent / SYNC
    if source.run is None or source.path.name != POLICY or not state.is_file():
        raise ConfigError(f"--format {AS_SAMPLER}: {source.path} is no checkpoint of a run")
    config = recorded_config(RunDir(source.run).config)
    quantization = config.quantization
    if quantization.format == Format.none:
        raise ConfigError(f"{source.run}: quantization.format is none; use export")
    held = {name: read_stored(name, stored) for name, stored in stored_tensors(state).items()}
    smoothing = None
    cache: dict[str, Tensor] = {}
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


def _nothing_new() -> Tensor:
    raise AssertionError("the scales of a sync that has been are not measured again")


def _write(source: Source, target: Path, recipe: Recipe) -> None:
    plain = source.plain
    source.refuse_misfits()
    layout = formats.quantization_config(
        recipe.format, recipe.ignore, KvCache.fp8 if recipe.cache else KvCache.none
    )
    changes = {"quantization_config": layout, **plain_dtype(source.hf_config)}
    beside = Beside(source.folder, changes)
    made = _quantized(plain, source.shape, recipe)
    write_folder(made, target, beside, "quantize", [source], format=recipe.format.value)


def _quantized(weights: Weights, shape: ModelShape, recipe: Recipe) -> Weights:
    """`weights`: plain ones, of a whole model; what no model has is left out."""
    behind = {name: param for param in stored_params(shape) for name in param.hf}
    specs: dict[str, TensorSpec] = {}
    source: dict[str, str] = {}  # output -> what it is made of
    for name in behind:
        for spec in _specs(weights.specs[name], recipe):
            specs[spec.name] = spec
            source[spec.name] = name
    specs |= {name: TensorSpec.of(name, scale) for name, scale in recipe.cache.items()}

    held: dict[str, Tensor] = {}  # made of the tensor that was read last

    def made(name: str, get: Get) -> Tensor:
        if name in recipe.cache:
            return recipe.cache[name]
        if name not in held:
            origin = source[name]
            held.clear()
            held.update(_made(origin, get(origin), behind[origin], recipe))
        return held[name]

    return weights.made_into(specs, made)


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


def _made(name: str, tensor: Tensor, param: Param, recipe: Recipe) -> dict[str, Tensor]:
    if recipe.rounds_first:  # as a learner in BF16 does
        tensor = tensor.to(torch_dtype(DTYPE))
    if recipe.smoothing is not None:
        tensor = recipe.smoothing.fold(param, tensor)
    if not recipe.quantizes(name):
        return {name: tensor.to(torch_dtype(DTYPE))}
    try:
        result = quantize(tensor, recipe.format)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return {name: result["weight"], formats.scale_name(name): result["weight_scale"]}
