"""What the sampler's engine cannot do with a model, found when a recipe is loaded. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_rl.device import Machine
from megatron_rl.schema import Config, Device, Format
from megatron_rl.weight_sync.formats import is_quantized
from megatron_rl.weight_sync.mapping import params
from megatron_rl.weight_sync.model_shape import ModelShape

EXPERTS_PATTERN = r"re:.*\.experts\..*"  # every expert, for quantization.ignore


def engine_problems(config: Config, machine: Machine, shape: ModelShape) -> Iterator[str]:
    """One message per problem, naming key, value and way out."""
    yield from _experts(config, machine, shape)


def _experts(config: Config, machine: Machine, shape: ModelShape) -> Iterator[str]:
    quantization = config.quantization
    if not shape.experts or quantization.format == Format.none:
        return
    counts: dict[int, tuple[int, int]] = {}  # layer -> (quantized expert tensors, all expert tensors)
    for param in params(shape):
        if param.expert is not None and param.layer is not None:
            quantized, total = counts.get(param.layer, (0, 0))
            quantized += sum(is_quantized(name, quantization.format, quantization.ignore) for name in param.hf)
            counts[param.layer] = (quantized, total + len(param.hf))
    mixed = [layer for layer, (quantized, total) in counts.items() if 0 < quantized < total]
    if mixed:
        yield (
            f"quantization.ignore: {quantization.ignore} names some of the expert weights of layer {mixed[0]} and not "
            f"others, but the engine runs all experts of a layer in one kernel; name all of them ({EXPERTS_PATTERN!r} "
            "is every expert) or none"
        )
    elif machine.kind == Device.cpu and any(quantized for quantized, _ in counts.values()):
        yield (
            f"quantization.format: {quantization.format} experts have no kernel on hosts; add {EXPERTS_PATTERN!r} to "
            "quantization.ignore (the experts stay in BF16, everything else is quantized), or use format none"
        )
