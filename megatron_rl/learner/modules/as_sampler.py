"""Switch of a CPU learner's linear layers, experts left out: plain, or the quantized sampler's
arithmetic, for which it quantizes their weights.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.learner.modules.linear import ColumnLinear, RowLinear, Sampled
from megatron_rl.models.mapping import Param, find, global_name
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups, merged_weight
from megatron_rl.models.table import Split
from megatron_rl.quantization.cpu_matmul import Fp8Weight, Int8Weight
from megatron_rl.quantization.formats import QUANTIZED, is_quantized
from megatron_rl.quantization.quantize import quantize, row_amax
from megatron_rl.quantization.smoothing import Smoothing


class AsSampler:
    """The learner's layers that can compute as the sampler; all ranks of a TP group call `use`."""

    def __init__(
        self,
        model: Model,
        groups: ShardGroups,
        format: Format,
        ignore: Sequence[str],
        engine_tp: int,
    ) -> None:
        self._model = model
        self._groups = groups
        self._format = format
        self._ignore = ignore
        self._engine_tp = engine_tp
        self._layers: list[tuple[Param, ColumnLinear | RowLinear]] = []
        self.smoothing: Smoothing | None = None
        self._folded: Tensor | None = None  # the scales that the present weights were made with
        self.stale = True  # weights have changed

    def watch(self, module: torch.nn.Module, first_layer: int) -> None:
        """Find the layers of one pipeline chunk; `first_layer`: number of its first layer."""
        for name, layer in module.named_modules():
            if not isinstance(layer, ColumnLinear | RowLinear) or ".experts." in name:
                continue
            param = find(global_name(f"{name}.weight", first_layer, 0), self._model.shape)
            quantized = [is_quantized(hf, self._format, self._ignore) for hf in param.hf]
            if all(quantized):
                self._layers.append((param, layer))
            elif any(quantized):
                raise ValueError(
                    f"quantization.ignore holds some of {', '.join(param.hf)}: the engine joins "
                    "them to one matrix; name all of them, or none"
                )

    def use(self, sampler: bool) -> None:
        if sampler:
            self._quantize()
            return
        for _, layer in self._layers:
            layer.sampled = None
        self.stale = True

    @torch.no_grad()
    def _quantize(self) -> None:
        scales = None if self.smoothing is None else self.smoothing.scales_LNH
        if not self.stale and scales is self._folded:
            return
        kind = Int8Weight if QUANTIZED[self._format].integer else Fp8Weight
        shared = self._shared_amax()
        for param, layer in self._layers:
            weight = merged_weight(layer)
            calm = None
            if self.smoothing is not None:
                weight = self.smoothing.fold(param, weight)
                calm = self.smoothing.scale_of(param)
            made = quantize(weight, self._format, shared.get(param.megatron))
            here = 1  # slices of the engine
            if isinstance(layer, RowLinear):
                layer.slices = self._engine_tp
                here = max(1, self._engine_tp // self._model.layout.tp)
            parts = made["weight"].chunk(here, 1)
            layer.sampled = Sampled(tuple(kind(part, made["weight_scale"]) for part in parts), calm)
        self.stale = False
        self._folded = scales

    def _shared_amax(self) -> dict[str, Tensor]:
        """Row maxima of the weights whose rows several ranks hold parts of, by name."""
        if self._model.layout.tp == 1:
            return {}
        rows = [(param, layer) for param, layer in self._layers if param.row.split is Split.row]
        if not rows:
            return {}
        flat = torch.cat([row_amax(merged_weight(layer)) for _, layer in rows])
        self._groups.tensor.max_(flat)
        sizes = [len(layer.weight) for _, layer in rows]
        return {
            param.megatron: amax for (param, _), amax in zip(rows, flat.split(sizes), strict=True)
        }
