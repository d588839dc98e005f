"""The largest key and value magnitude of each layer, seen in the learner's own forward passes.

Taken where the sampler takes what it caches: keys after their norm and rotation. Filler positions of a pack are left
out, so that the maximum over all ranks is the same whatever the layout, to the rounding of the forward pass.

L layers of the whole model; the last dimension is (key, value).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.activation_stats import passing_pack
from megatron_rl.learner.packing import Pack
from megatron_rl.models.shape import ModelShape


class CacheStats:
    """Sees nothing until `watch` is called."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.amax_L2 = torch.zeros(shape.layers, 2, device=device)
        self._active = True

    def watch(self, model: Any, first_layer: int) -> None:
        """Follow one chunk of the pipeline, in training as in scoring: every pass says what the policy caches."""
        passing = passing_pack(model)
        for index, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention.core_attention
            attention.register_forward_pre_hook(partial(self._see, first_layer + index, passing))

    @contextmanager
    def blind(self) -> Iterator[None]:
        """While another policy's weights are in the model."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def take(self) -> Tensor:
        """[L, 2] since the last call, 0 where nothing was seen."""
        taken = self.amax_L2.clone()
        self.amax_L2.zero_()
        return taken

    @torch.no_grad()
    def _see(self, layer: int, passing: list[Pack], module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        (pack,) = passing
        if not self._active or not pack.tokens:
            return
        _, key, value, *_ = args  # positions first
        seen_2 = torch.stack([part[: pack.tokens].detach().abs().amax() for part in (key, value)]).float()
        torch.maximum(self.amax_L2[layer], seen_2, out=self.amax_L2[layer])
