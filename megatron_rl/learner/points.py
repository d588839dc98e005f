"""Where the values of each point (models/points.py) pass in the modules of a learner's rank, on a host.

megatron-core keeps queries, keys and values interleaved by group, and cuts rows and columns over its ranks: a port
says which columns of a point's values pass here, in which order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_rl.learner.learner import Learner
from megatron_rl.models.mapping import find
from megatron_rl.models.points import Kind, Point


@dataclass(frozen=True, eq=False)
class Port:
    point: Point
    module: torch.nn.Module
    columns: Tensor  # of the point's values, in the order in which they pass here
    rows_split: bool = False  # over the tensor-parallel ranks
    argument: int | None = None  # of the module, where it is not its output


def ports(learner: Learner) -> Iterator[Port]:
    return _Ports(learner).all()


class _Ports:
    def __init__(self, learner: Learner) -> None:
        self.learner, self.shape, self.layout, self.place = learner, learner.shape, learner.layout, learner.place
        self.rows_split = bool(learner.megatron_config.sequence_parallel)
        if self.shape.kv_heads % self.layout.tp:
            raise ValueError(
                f"learner.tensor_parallel: {self.layout.tp} ranks do not share {self.shape.kv_heads} key/value heads "
                "evenly, so that their values cannot be compared with the engine's; use fewer"
            )

    def all(self) -> Iterator[Port]:
        for chunk, policy in enumerate(self.learner.modules):
            first = self.layout.layers(self.shape.layers, self.place.pp, chunk).start
            if policy.pre_process:
                yield self._hidden(Point(Kind.embedding), policy.embedding)
            for layer, module in enumerate(policy.decoder.layers, first):
                yield from self._attention(layer, module)
                yield from self._mlp(layer, module)
            if policy.decoder.final_layernorm is not None:
                yield self._hidden(Point(Kind.final_norm), policy.decoder.final_layernorm)
            if policy.post_process:
                yield Port(Point(Kind.lm_head), policy.output_layer, self._of_param("output_layer.weight"))

    def _attention(self, layer: int, module: Any) -> Iterator[Port]:
        attention, name = module.self_attention, f"decoder.layers.{layer}.self_attention"
        query = self._share(0, self.shape.size("q"))
        key = self._share(self.shape.size("q"), self.shape.size("kv"))
        yield self._hidden(Point(Kind.input_norm, layer), module.input_layernorm)
        qkv = self._of_param(f"{name}.linear_qkv.weight")
        yield Port(Point(Kind.qkv, layer), attention.linear_qkv, qkv)
        if self.shape.has("qk_norm"):
            yield Port(Point(Kind.head_norm, layer), attention.q_layernorm, query)
            yield Port(Point(Kind.head_norm, layer), attention.k_layernorm, key)
        yield Port(Point(Kind.rotary, layer), attention.core_attention, query, argument=0)
        yield Port(Point(Kind.rotary, layer), attention.core_attention, key, argument=1)
        yield Port(Point(Kind.attention, layer), attention.core_attention, query)
        yield self._hidden(Point(Kind.o_proj, layer), attention.linear_proj)

    def _mlp(self, layer: int, module: Any) -> Iterator[Port]:
        yield self._hidden(Point(Kind.post_norm, layer), module.pre_mlp_layernorm)
        if not self.shape.has("dense_mlp", layer):
            yield self._hidden(Point(Kind.experts, layer), module.mlp)
            return
        gate_up = self._of_param(f"decoder.layers.{layer}.mlp.linear_fc1.weight")
        yield Port(Point(Kind.gate_up, layer), module.mlp.linear_fc1, gate_up)
        yield Port(Point(Kind.activation, layer), module.mlp.activation_func, self._share(0, self.shape.ffn))
        yield self._hidden(Point(Kind.down, layer), module.mlp.linear_fc2)

    def _hidden(self, point: Point, module: torch.nn.Module) -> Port:
        return Port(point, module, torch.arange(self.shape.hidden), rows_split=self.rows_split)

    def _share(self, start: int, size: int) -> Tensor:
        """Of columns that are cut into equal shares."""
        here = size // self.layout.tp
        return torch.arange(start + self.place.tp * here, start + (self.place.tp + 1) * here)

    def _of_param(self, name: str) -> Tensor:
        """The outputs of a matrix, as its rows lie here."""
        here, start = [], 0
        for piece in find(name, self.shape).slices(self.shape, self.layout, self.place):
            here += [(span.local, start + span.full, span.length) for span in piece.spans]
            start += piece.shape[0]
        nothing = torch.zeros(0, dtype=torch.int64)
        return torch.cat([nothing, *(torch.arange(full, full + length) for _, full, length in sorted(here))])
