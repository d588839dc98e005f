"""Counts for plans: parameters on each rank of the learner, and bytes of an engine's weights in its format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.mapping import Param, adapters, params, stage_params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Split
from megatron_rl.models.tensors import DTYPES
from megatron_rl.quantization.formats import QUANTIZED, SCALE_DTYPE, is_quantized, scale_shape

BF16 = 2  # bytes


@dataclass(frozen=True)
class Held:
    """Parameters of one rank of a pipeline stage."""

    dense: int
    experts: int
    linear: int  # of both: matrices that Transformer Engine multiplies
    adapters: tuple[int, int] | None = None  # of dense layers and of experts: what is trained instead

    @property
    def count(self) -> int:
        return self.dense + self.experts + sum(self.adapters or ())

    @property
    def trained(self) -> tuple[int, int]:
        """Of dense layers, and of experts."""
        return (self.dense, self.experts) if self.adapters is None else self.adapters


def held(shape: ModelShape, layout: Layout, stage: int) -> Held:
    """Layers are alike: one of them is counted, and the ends of the pipeline."""
    layer, ends = _parts(shape, layout.tp, layout.expert_tp, layout.ep, layout.pp > 1)
    layers = layout.stage_layers(shape.layers)[stage]
    outer = sum(size for where, size in ends if stage == (0 if where == "first" else layout.pp - 1))
    of_adapters = layer.adapters and (layer.adapters[0] * layers, layer.adapters[1] * layers)
    return Held(layer.dense * layers + outer, layer.experts * layers, layer.linear * layers, of_adapters)


@cache
def _parts(
    shape: ModelShape, tp: int, expert_tp: int, ep: int, several: bool
) -> tuple[Held, tuple[tuple[str, int], ...]]:
    """Parameters of a rank: one layer's, and (end of the pipeline, parameters there)."""
    layout, one = Layout(tp=tp, etp=expert_tp, ep=ep), replace(shape, layers=1)
    inside = [param for param in stage_params(one, layout, Place()) if param.layer is not None]
    count, beside = dict.fromkeys(("dense", "experts", "linear"), 0), [0, 0]
    for param in inside:
        size = prod(param.local_shape(layout))
        count["experts" if param.row.expert else "dense"] += size
        beside[param.row.expert] += sum(prod(each.local_shape(layout)) for each in adapters(param, one))
        count["linear"] += size * (param.row.split is not Split.replicated and len(param.shapes[0]) == 2)
    ends = [
        ("first" if param.row.megatron[0].startswith("embedding.") else "last", prod(param.local_shape(layout)))
        for param in params(one)
        if param.layer is None and not (param.row.copy and not several)
    ]
    return Held(**count, adapters=(beside[0], beside[1]) if shape.lora else None), tuple(ends)


@dataclass(frozen=True)
class EngineWeights:
    """Bytes, by how the ranks of a tensor-parallel engine hold them."""

    whole: int = 0
    split: int = 0
    key_value: int = 0  # split over key-value heads, of which the ranks beyond hold copies
    experts: int = 0  # of all three: experts

    @property
    def nbytes(self) -> int:
        return self.whole + self.split + self.key_value

    def of_rank(self, tp: int, kv_heads: int) -> int:
        return self.whole + self.split // tp + self.key_value // min(tp, kv_heads)


@cache
def engine_weights(shape: ModelShape, format: Format, ignore: tuple[str, ...]) -> EngineWeights:
    counts = {"whole": 0, "split": 0, "key_value": 0, "experts": 0}
    for param in params(shape):
        if param.row.copy:
            continue
        for name, size in zip(param.hf, param.shapes, strict=True):
            nbytes = _nbytes(name, size, format, ignore)
            counts[_way(param, name)] += nbytes
            counts["experts"] += nbytes * param.row.expert
    return EngineWeights(**counts)


def _nbytes(name: str, size: tuple[int, ...], format: Format, ignore: tuple[str, ...]) -> int:
    if not is_quantized(name, format, ignore):
        return BF16 * prod(size)
    kind = QUANTIZED[format]
    rows, columns = size
    scales: int = prod(scale_shape(rows, columns, kind.blocks))
    return DTYPES[kind.dtype][1] * prod(size) + DTYPES[SCALE_DTYPE][1] * scales


def _way(param: Param, name: str) -> str:
    if param.row.split is Split.replicated:
        return "whole"
    return "key_value" if name.rsplit(".", 2)[-2] in ("k_proj", "v_proj") else "split"
