"""Low-rank adapters: their sizes, and which weights have them. Torch-free.

A weight [N, K] is read as weight + alpha / rank * B A, A [rank, K] and B [N, rank]. The mapping table gives both their
names and shards (mapping.adapters): B's rows lie as the weight's, so do A's columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import ALL_LINEAR, LoraSection

NAME = "lora"  # of an adapter in its layer
KEY = f".{NAME}."  # in the names of adapters under megatron-core


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
