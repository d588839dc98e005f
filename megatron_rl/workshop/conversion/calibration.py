"""What the model's own forward pass shows of its activations: the learner's, as at the sync of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from megatron_rl.config.schema import Config, QuantizationSection
from megatron_rl.models.layout import Layout
from megatron_rl.models.model import Model
from megatron_rl.workshop.conversion.prompts import batch_of
from megatron_rl.workshop.conversion.sources import Source

if TYPE_CHECKING:
    from megatron_rl.learner.learner import Learner


@dataclass(frozen=True)
class Coverage:
    """How much was looked at, and of what share of the places to measure anything was seen."""

    samples: int
    tokens: int
    seen: float  # of a learner's channels, of modelopt's quantizers

    def __str__(self) -> str:
        return f"{self.samples} samples, {self.tokens} tokens, {self.seen:.1%} of the places to measure were reached"


@contextmanager
def learner_at(source: Source, quantization: QuantizationSection | None = None) -> Iterator[Learner]:
    """The model in this process alone, with the weights of `source`."""
    from megatron_rl.learner.learner import Learner  # megatron: seconds that other conversions need not wait for
    from megatron_rl.learner.policy import Sections

    config = Config(quantization=quantization or Config().quantization)
    learner = Learner(Model.of(source.hf_config, Layout()), Sections.of(config))
    try:
        learner.load_hf(source.path)
        yield learner
    finally:
        learner.close()


def activation_amax(source: Source, rows: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, Coverage]:
    """[layer, norm, channel]: the largest magnitude of each norm's output."""
    with learner_at(source, QuantizationSection(smoothing=0.5)) as learner:  # any: it is what makes a learner look
        learner.logprobs(batch_of(rows))
        amax_LNH = learner.take_activation_amax().cpu()
    seen = float((amax_LNH > 0).float().mean())
    return amax_LNH, Coverage(len(rows), sum(map(len, rows)), seen)


def about(coverage: Coverage, given: str) -> dict[str, object]:
    """For parity.json."""
    return {"of": given, **asdict(coverage)}
