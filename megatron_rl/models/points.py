"""Names, in order, of points in a forward pass where learner and engine are compared. Torch-free.

Which module shows each is in `apps/mismatch/mismatch.py` and `engine/hooks.py`.

The values of a point are [positions, width]; those that several of Hugging Face's matrices make lie
side by side: queries, keys, values; gate, up.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron_rl.models.shape import ModelShape


class Kind(StrEnum):
    embedding = "embedding"
    input_norm = "input_norm"
    qkv = "qkv"
    head_norm = "head_norm"  # of queries and keys
    rotary = "rotary"  # queries and keys as attention gets them
    attention = "attention"
    o_proj = "o_proj"
    post_norm = "post_norm"
    gate_up = "gate_up"
    activation = "activation"
    down = "down"
    experts = "experts"
    final_norm = "final_norm"
    lm_head = "lm_head"
    logprob = "logprob"  # of each token after the first


@dataclass(frozen=True)
class Point:
    kind: Kind
    layer: int | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return self.kind.value
        return f"layers.{self.layer}.{self.kind.value}"


def points(shape: ModelShape) -> Iterator[Point]:
    yield Point(Kind.embedding)
    for layer in range(shape.layers):
        attention = [
            Kind.input_norm,
            Kind.qkv,
            Kind.rotary,
            Kind.attention,
            Kind.o_proj,
            Kind.post_norm,
        ]
        if shape.has("qk_norm"):
            attention.insert(2, Kind.head_norm)
        dense = (Kind.gate_up, Kind.activation, Kind.down)
        for kind in (*attention, *(dense if shape.has("dense_mlp", layer) else (Kind.experts,))):
            yield Point(kind, layer)
    yield from map(Point, (Kind.final_norm, Kind.lm_head, Kind.logprob))
