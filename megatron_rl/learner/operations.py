"""What a token costs the learner, in floating-point operations of a forward pass. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.learner import limits
from megatron_rl.models.model import Model


@dataclass(frozen=True)
class Operations:
    """Of a token's forward pass, in floating-point operations."""

    dense: float  # in matrices that every token meets
    experts: float
    head: float  # only for tokens of answers
    attention: float  # at the mean length

    @property
    def body(self) -> float:
        return self.dense + self.experts + self.attention


def operations(model: Model, length: float) -> Operations:
    """A matrix costs two for each element; attention looks back at half of the sequence, twice."""
    shape = model.shape
    projections = shape.hidden * (2 * shape.size("q") + 2 * shape.size("kv"))
    if shape.experts:
        chosen = limits.experts_per_token(model.hf_config)
        mlp, experts = shape.hidden * shape.experts, 3 * shape.hidden * shape.expert_ffn * chosen
    else:
        mlp, experts = 3 * shape.hidden * shape.ffn, 0
    return Operations(
        dense=2.0 * shape.layers * (projections + mlp),
        experts=2.0 * shape.layers * experts,
        head=2.0 * shape.hidden * shape.vocab,
        attention=2.0 * shape.layers * shape.size("q") * length,
    )


def attention_share(model: Model) -> float:
    """Of attention over a sequence, for each token of its length, as a share of what its matrices cost."""
    each = operations(model, 1)
    return each.attention / (each.dense + each.experts + each.head)
