"""Observers of the learner's forward passes: largest outputs of norms (for smoothing), largest keys
and values (for the scales of an FP8 cache); for other hooks, the pack that passes and norms inside
Transformer Engine's kernels.

Each rank keeps its own maxima. A maximum over all ranks, micro-batches and passes does not depend
on the layout (to the rounding of the forward pass itself), because filler positions are left out.

L layers of the whole model, N norms of a layer, S positions of a pack (of this rank, where they are
split), H hidden channels. A dimension of 2 is (key, value).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron_rl.learner.modules.kernels import kernels_for
from megatron_rl.learner.modules.packing import Pack
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.table import Norm


class Amax:
    """Largest magnitudes since they were last taken; 0 if nothing was observed. Subclasses choose
    the observed tensors.
    """

    def __init__(self, *size: int, device: torch.device, active: bool) -> None:
        self.amax = torch.zeros(size, device=device)
        self.active = active

    @property
    def looks(self) -> bool:
        """True if this pass is observed; never in a backward pass, which may recompute a pack."""
        return self.active and torch._C._current_graph_task_id() == -1

    @contextmanager
    def looking(self, active: bool) -> Iterator[None]:
        before = self.active
        self.active = active
        try:
            yield
        finally:
            self.active = before

    def take(self) -> Tensor:
        taken = self.amax.clone()
        self.amax.zero_()
        return taken

    def add(self, place: Any, seen: Tensor) -> None:
        torch.maximum(self.amax[place], seen, out=self.amax[place])


class ActivationStats(Amax):
    """Maxima of the linear layers' inputs: [L, N, H]. Active in scoring, or in a scoring update."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        super().__init__(shape.layers, len(Norm), shape.hidden, device=device, active=False)

    def watch(self, model: Any, first_layer: int, shard: int | None) -> None:
        """Follow one pipeline chunk. `shard`: this rank's number where ranks split positions."""
        passing = passing_pack(model)
        for index, layer in enumerate(model.decoder.layers):
            norms = {Norm.attention: layer.input_layernorm, Norm.mlp: layer.pre_mlp_layernorm}
            for norm, module in norms.items():
                see = partial(self._see, (first_layer + index, norm), passing, shard)
                if not isinstance(module, IdentityOp):
                    module.register_forward_hook(lambda _, args, output, see=see: see(output))
                    continue
                # Transformer Engine: the norm lives in the layer that reads it
                if norm is Norm.attention:
                    reader = layer.self_attention.linear_qkv
                else:
                    reader = layer.mlp.linear_fc1
                reader.register_forward_pre_hook(lambda linear, args, see=see: see(args[0], linear))

    @torch.no_grad()
    def _see(
        self, place: Any, passing: list[Pack], shard: int | None, x_S1H: Tensor, linear: Any = None
    ) -> None:
        """Raise the maxima by an input `x_S1H`, or by the norm of it that is inside `linear`."""
        if not self.looks:
            return
        (pack,) = passing
        x_MH = x_S1H.detach().flatten(0, 1)
        first = (shard or 0) * len(x_MH)
        if pack.real_S is None:
            x_MH = x_MH[: max(pack.tokens - first, 0)]
            kernels = kernels_for(x_MH)
            if kernels is not None:
                norm = () if linear is None else (linear.layer_norm_weight, linear.eps)
                kernels.raise_amax(self.amax[place], x_MH, *norm)
                return
        output_MH = x_MH if linear is None else fused_norm(linear, x_MH)
        if pack.real_S is not None:
            output_MH = output_MH * pack.real_S[first:][: len(x_MH), None]
        if len(output_MH):
            self.add(place, output_MH.abs().amax(0).float())


def fused_norm(linear: Any, input: Tensor) -> Tensor:
    """The norm inside a kernel of Transformer Engine that reads it, computed once more."""
    wide = input.float()
    scale = wide.square().mean(-1, keepdim=True).add_(linear.eps).rsqrt_()
    return (wide * scale).mul_(linear.layer_norm_weight.float())  # an FP32 input is its own `wide`


class CacheStats(Amax):
    """Maxima of cached keys (after norm and rotation) and values: [L, 2]. Active in every pass."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        super().__init__(shape.layers, 2, device=device, active=True)

    def watch(self, model: Any, first_layer: int) -> None:
        """Follow one chunk of the pipeline."""
        passing = passing_pack(model)
        for index, layer in enumerate(model.decoder.layers):
            attention = layer.self_attention.core_attention
            attention.register_forward_pre_hook(partial(self._see, first_layer + index, passing))

    @torch.no_grad()
    def _see(
        self, layer: int, passing: list[Pack], module: torch.nn.Module, args: tuple[Any, ...]
    ) -> None:
        (pack,) = passing
        if not self.looks or not pack.tokens:
            return
        _, key, value, *_ = args  # positions first
        real = slice(pack.tokens) if pack.real_S is None else pack.real_S
        seen = [part[real].detach().abs().flatten() for part in (key, value)]
        self.add(
            layer,
            torch.stack([one.amax() if len(one) else one.new_zeros(()) for one in seen]).float(),
        )


def passing_pack(model: torch.nn.Module) -> list[Pack]:
    """A list with the pack that is passing through the model, for hooks on its layers."""
    passing: list[Pack] = []

    def remember(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passing[:] = [kwargs["pack"]]

    model.register_forward_pre_hook(remember, with_kwargs=True)
    return passing
