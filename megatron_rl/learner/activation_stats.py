"""The largest magnitude per channel of what the linear layers read, seen during the learner's own forward passes.

Each rank keeps what it saw: its stage's layers, its rows of the batch, its positions under sequence parallelism.
The maximum over all ranks, micro-batches and passes is the same whatever the layout (to the rounding of the forward
pass itself), because filler positions are left out.

L layers, N norms of a layer, S positions of a pack (of this rank, where they are split), H hidden channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_rl.learner.packing import Pack
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm


class ActivationStats:
    """Sees nothing until `watch` is called, and counts nothing outside `observing`."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self.amax_LNH = torch.zeros(shape.layers, len(Norm), shape.hidden, device=device)
        self._active = False

    def watch(self, model: Any, first_layer: int, shard: int | None) -> None:
        """Follow one chunk of the pipeline. `shard`: this rank's number where positions are split over ranks."""
        passing = passing_pack(model)
        for index, layer in enumerate(model.decoder.layers):
            for norm, module, reader in (
                (Norm.attention, layer.input_layernorm, lambda layer=layer: layer.self_attention.linear_qkv),
                (Norm.mlp, layer.pre_mlp_layernorm, lambda layer=layer: layer.mlp.linear_fc1),
            ):
                see = partial(self._see, first_layer + index, norm, passing, shard)
                if isinstance(module, IdentityOp):  # Transformer Engine: the norm lives in the layer that reads it
                    reader().register_forward_pre_hook(partial(_fused, see))
                else:
                    module.register_forward_hook(partial(_plain, see))

    @contextmanager
    def observing(self) -> Iterator[None]:
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def take(self) -> Tensor:
        """[L, N, H] since the last call, 0 where nothing was seen."""
        taken = self.amax_LNH.clone()
        self.amax_LNH.zero_()
        return taken

    @torch.no_grad()
    def _see(
        self, layer: int, norm: Norm, passing: list[Pack], shard: int | None, rows: int, output: Callable[[], Tensor]
    ) -> None:
        if not self._active:
            return
        (pack,) = passing
        real = min(max(pack.tokens - (shard or 0) * rows, 0), rows)
        if real:
            amax_H = output()[:real].abs().amax(0).float()
            torch.maximum(self.amax_LNH[layer, norm], amax_H, out=self.amax_LNH[layer, norm])


def passing_pack(model: torch.nn.Module) -> list[Pack]:
    """Holds the pack that the model is in the middle of: hooks on its layers do not see it."""
    passing: list[Pack] = []

    def remember(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passing[:] = [kwargs["pack"]]

    model.register_forward_pre_hook(remember, with_kwargs=True)
    return passing


def _plain(see: Callable[..., None], norm: torch.nn.Module, args: tuple[Any, ...], output_S1H: Tensor) -> None:
    output_SH = output_S1H.detach().flatten(0, 1)
    see(len(output_SH), lambda: output_SH)


def _fused(see: Callable[..., None], linear: Any, args: tuple[Any, ...]) -> None:
    """Not yet run on a GPU. The norm's output never exists outside the kernel: it is computed once more."""
    input_SH = args[0].detach().flatten(0, 1)

    def output() -> Tensor:
        wide_SH = input_SH.float()
        scale_S1 = wide_SH.square().mean(-1, keepdim=True).add_(linear.eps).rsqrt_()
        return wide_SH.mul_(scale_S1).mul_(linear.layer_norm_weight.float())

    see(len(input_SH), output)
