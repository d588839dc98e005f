"""Low-rank adapters beside the learner's linear layers; everything else is frozen, without
gradients or masters.

The layers stay megatron-core's, on CPUs and under Transformer Engine: a hook adds scale * (x A^T)
B^T to their outputs. Where ranks hold parts of the product x A^T (row-parallel layers), or of what
goes back to it (column-parallel ones), they add those up: `rank` numbers for each token. Experts'
tokens are added up by their dispatcher, so that there the gradient of what all ranks hold alike is
added up instead.

S positions of a pack, K input features held here, N output features held here, R the rank, T
tensors in Hugging Face.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from megatron_rl.learner.modules import cpu  # noqa: F401  before megatron

from megatron.core import parallel_state, tensor_parallel  # isort: skip

from megatron_rl.models.mapping import Param, adapted_rows, adapters, find, global_name
from megatron_rl.models.model import Model
from megatron_rl.models.shape import ADAPTER
from megatron_rl.models.shards import ShardGroups, merge, row_numbers, weight_names
from megatron_rl.models.table import Split

# what a layer has while it computes with its merged weight
MERGED = ("sampled", "forward")


def adapt(module: Any, first_layer: int, model: Model, groups: ShardGroups) -> None:
    """Freeze a chunk of the pipeline, and put adapters beside the layers that are targets."""
    module.requires_grad_(False)
    module.adapted = True
    for name, layer in list(module.named_modules()):
        own = weight_names(layer)
        if own and "layers." in name:
            param = find(global_name(f"{name}.{own[0]}", first_layer), model.shape)
            if adapters(param, model.shape):
                layer.add_module(ADAPTER, Adapter(layer, own, param, model, groups))
                layer.register_forward_hook(_add)


def _add(
    layer: Any, args: tuple[Any, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    if not layer.lora.active or any(vars(layer).get(name) for name in MERGED):
        return output
    out, bias = output
    return out + layer.lora(layer, *args), bias


class Adapter(torch.nn.Module):
    """A [T * R, K] and B [N, R] of a layer; A0, B0, A1, ... of a layer with several experts."""

    mask_NT: Tensor | None  # which rows are of which tensor; None: all are of the only one

    def __init__(
        self, layer: Any, own: list[str], param: Param, model: Model, groups: ShardGroups
    ) -> None:
        super().__init__()
        lora = model.shape.lora
        place = groups.place
        assert lora is not None
        self.scale = lora.scale
        self.active = True
        self.numbers = [name.removeprefix("weight") for name in own]
        self.by_row = param.row.split is Split.row
        self.expert = param.row.expert
        self.splits_positions = bool(layer.sequence_parallel) and not self.expert
        self.ranks, mine = param.tensor_parallel(model.layout, place)
        if self.expert:
            self.group = parallel_state.get_expert_tensor_parallel_group()
        else:
            self.group = parallel_state.get_tensor_model_parallel_group()
        weight = getattr(layer, own[0])
        spans = adapted_rows(param, model.shape, model.layout, place)
        self.rows = row_numbers(spans)
        mask_NT = torch.zeros((len(weight), len(spans)), dtype=weight.dtype)
        for kind, rows in enumerate(self.rows):
            mask_NT[rows, kind] = 1
        self.register_buffer("mask_NT", None if bool(mask_NT.all()) else mask_NT, persistent=False)
        for letter, one in zip("AB", adapters(param, model.shape), strict=True):
            for number in self.numbers:
                made = torch.nn.Parameter(
                    torch.zeros(one.local_shape(model.layout), dtype=weight.dtype)
                )
                whole = one.row.split is Split.replicated
                made.allreduce = getattr(weight, "allreduce", True)  # type: ignore[attr-defined]
                # as megatron-core's norm of the gradient counts each value once
                made.tensor_model_parallel = not whole or (self.expert and mine == 0)  # type: ignore[attr-defined]
                # each rank has its positions' gradient, which megatron-core adds up after backward
                made.sequence_parallel = whole and self.splits_positions  # type: ignore[attr-defined]
                self.register_parameter(f"{letter}{number}", made)

    def forward(self, layer: Any, x: Tensor, m_splits: list[int] | None = None) -> Tensor:
        """Return the adapter's term of the layer's output. `m_splits`: tokens of each expert."""
        # Transformer Engine norms inside of the layer
        norm = layer._parameters.get("layer_norm_weight")
        if norm is not None:
            x = rms_norm(x, norm.shape, norm, layer.eps)
        if m_splits is None:
            return self._one(x, "")
        parts = zip(x.split(m_splits), self.numbers, strict=True)
        return torch.cat([self._one(some, number) for some, number in parts])

    def _one(self, x: Tensor, number: str) -> Tensor:
        a, b_NR = (getattr(self, f"{letter}{number}") for letter in "AB")
        if self.expert and self.ranks > 1:
            a, b_NR = (a, self._summed(b_NR)) if self.by_row else (self._summed(a), b_NR)
        inner = linear(x, a)
        if not self.expert and self.ranks > 1:
            inner = self._over_ranks(inner)
        if self.mask_NT is not None:
            b_NR = (self.mask_NT[:, :, None] * b_NR[:, None]).flatten(1)
        return linear(inner, b_NR).mul(self.scale)

    def _over_ranks(self, inner: Tensor) -> Tensor:
        if self.splits_positions and self.by_row:
            return tensor_parallel.reduce_scatter_to_sequence_parallel_region(
                inner, group=self.group
            )
        if self.splits_positions:
            return tensor_parallel.gather_from_sequence_parallel_region(inner, group=self.group)
        if self.by_row:
            return tensor_parallel.reduce_from_tensor_model_parallel_region(inner, group=self.group)
        return tensor_parallel.copy_to_tensor_model_parallel_region(inner, group=self.group)

    def _summed(self, parameter: Tensor) -> Tensor:
        return tensor_parallel.copy_to_tensor_model_parallel_region(parameter, group=self.group)

    @torch.no_grad()
    def merged(self, weight_NK: Tensor, number: str = "") -> Tensor:
        a, b_NR = (getattr(self, f"{letter}{number}").detach() for letter in "AB")
        return merge(
            weight_NK,
            a,
            b_NR,
            [rows.to(a.device) for rows in self.rows],
            self.scale,
        )


@contextmanager
def adapters_off(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Disable the adapters inside the context: the model is then the initial one."""
    held = [
        adapter
        for module in modules
        for adapter in module.modules()
        if isinstance(adapter, Adapter)
    ]
    try:
        for adapter in held:
            adapter.active = False
        yield
    finally:
        for adapter in held:
            adapter.active = True
