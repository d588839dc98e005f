"""Low-rank adapters: which weights have them, and a weight merged with its own, the same bits in every layout.

A weight [N, K] is read as weight + alpha / rank * B A, A [rank, K] and B [N, rank]. The mapping table gives both their
names and shards (mapping.adapters): B's rows lie as the weight's, so do A's columns. Torch-free until something is
merged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_rl.config.schema import ALL_LINEAR, LoraSection

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEY = ".lora."  # in the names of adapters under megatron-core
HELD = {"cpu": 1 << 18, "cuda": 1 << 25}  # FP32 values that are merged at once: what stays in a cache


@dataclass(frozen=True)
class Lora:
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, section: LoraSection) -> Lora | None:
        return cls(section.rank, section.alpha, tuple(section.targets)) if section.rank else None

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def adapts(self, hf: str) -> bool:
        """Whether the linear layer behind a Hugging Face name is a target."""
        return ALL_LINEAR in self.targets or hf.split(".")[-2] in self.targets


def row_numbers(kinds: Iterable[Iterable[Any]], device: torch.device | None = None) -> list[Tensor]:
    """The rows of a shard that each of its kinds has, of their spans (mapping.adapted_rows)."""
    import torch

    runs = [[torch.arange(span.local, span.local + span.length) for span in kind] for kind in kinds]
    return [torch.cat([torch.arange(0), *of_kind]).to(device) for of_kind in runs]


def merge(weight_NK: Tensor, a: Tensor, b_NR: Tensor, rows: Sequence[Tensor], scale: float) -> Tensor:
    """The weight with its adapter, rounded once to its own precision.

    `rows`: of each tensor that Hugging Face keeps apart, whose A's are stacked in `a`. Products are summed over the
    rank one after the other, in FP32, by operations that round each element by itself: a product of matrices would
    sum in an order that depends on the shape of the shard.
    """
    import torch

    merged, rank = weight_NK.clone(), b_NR.shape[1]
    wide_a, wide_b = a.float(), b_NR.float()
    step = max(1, HELD[weight_NK.device.type] // weight_NK.shape[1])
    for kind, rows_n in enumerate(rows):
        mine = wide_a[kind * rank : (kind + 1) * rank]
        for some_n in rows_n.split(step):
            sum_nK = torch.zeros((len(some_n), weight_NK.shape[1]), device=weight_NK.device)
            product_nK, factors_nR = torch.empty_like(sum_nK), wide_b[some_n]
            for place in range(rank):
                torch.mul(factors_nR[:, place, None], mine[place], out=product_nK)
                sum_nK.add_(product_nK)
            merged[some_n] = sum_nK.mul_(scale).add_(weight_NK[some_n].float()).to(merged.dtype)
    return merged
