"""Scales of an FP8 key-value cache, two per layer: computed at each sync from the learner's maxima,
sent with the weights.

A scale is the largest magnitude in the learner since the previous sync, over FP8's maximum. Larger
values later saturate, until the next sync.

L layers of the complete model; the last dimension is (key, value).
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from megatron_rl.distributed import Group
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.quantization.formats import FP8_MAX, SCALE_DTYPE


class CacheScales:
    """Scales, equal on every rank. `take_cache_amax`: this rank's new maxima, [L, 2]."""

    def __init__(self, layers: int, world: Group, take_cache_amax: Callable[[], Tensor]) -> None:
        self._layers = layers
        self._world = world
        self._take = take_cache_amax
        self._scales_L2: Tensor | None = None
        self._repeats = False

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(name, SCALE_DTYPE, (1,)) for name in self._names())

    def begin_sync(self) -> None:
        """Compute the scales of a sync, on every rank. A layer without new maxima keeps its
        scale.
        """
        if self._repeats:
            self._repeats = False
            return
        amax_L2 = self._take().float()
        self._world.max_(amax_L2)
        if not bool(torch.isfinite(amax_L2).all()):
            raise ValueError(
                "keys or values of the learner's forward pass are not finite: it has diverged"
            )
        made_L2 = amax_L2 / FP8_MAX
        if self._scales_L2 is None and not bool((amax_L2 > 0).all()):
            raise ValueError(
                "quantization.kv_cache=fp8: the learner has made no forward pass to measure keys "
                "and values on; score a batch before the first sync"
            )
        # those of a checkpoint are on the CPU
        if self._scales_L2 is None:
            kept_L2 = made_L2
        else:
            kept_L2 = self._scales_L2.to(made_L2)
        self._scales_L2 = torch.where(amax_L2 > 0, made_L2, kept_L2)

    def state(self) -> dict[str, Tensor]:
        if self._scales_L2 is None:
            return {}
        return {"cache_scales": self._scales_L2}

    def restore(self, state: Mapping[str, Tensor], repeats: bool) -> None:
        """Load scales. `repeats`: the next sync is again the one before the checkpoint, with its
        scales.
        """
        if "cache_scales" in state:
            self._scales_L2 = state["cache_scales"]
            self._repeats = repeats

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Return (name in a checkpoint, scale), as vLLM's loaders expect them."""
        assert self._scales_L2 is not None
        yield from zip(self._names(), self._scales_L2.reshape(-1, 1).unbind(), strict=True)

    def _names(self) -> list[str]:
        return [
            f"model.layers.{layer}.self_attn.{kind}_scale"
            for layer in range(self._layers)
            for kind in "kv"
        ]
