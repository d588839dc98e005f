"""Two models, tensor by tensor: equal, equal but for the dtype, within the rounding of a format, or different.

A quantized weight is held against the plain one element by element: rounding moves a number by half a step of the
format at the most, so that one swapped row, one lost scale or one stale expert shows, however small the mean error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_rl.models.shape import FAMILIES
from megatron_rl.models.weight_files import EMBEDDING, HARMLESS, TIED_COPY
from megatron_rl.workshop.conversion.dequantized import dequantized, meaning, modules_of, portions
from megatron_rl.workshop.conversion.progress import Progress
from megatron_rl.workshop.conversion.smoothed import smoothed_as
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.stored_forms import Meaning, part_of, restore
from megatron_rl.workshop.conversion.weights import Get, Weights, digest, watched

ROUNDING = 2.0**-8  # of a plain weight that is BF16, relative


class Verdict(StrEnum):
    equal = "equal"
    rounded = "rounded"  # to another dtype, and otherwise equal
    within_a_step = "within_a_step"
    within_the_bound = "within_the_bound"
    differs = "differs"
    missing = "missing"


@dataclass(frozen=True)
class Compared:
    name: str
    verdict: Verdict
    error: float = 0.0  # relative, Frobenius
    said: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in (Verdict.differs, Verdict.missing)


@dataclass
class Model:
    """A side of the comparison. `seen`: digests of what was read of it."""

    stored: Weights
    quantized: Mapping[str, list[str]]  # module -> the tensors of its weight
    meaning: Meaning
    plain: Weights

    @classmethod
    def of(cls, source: Source, seen: dict[str, str]) -> Model:
        stored, config = watched(source.weights, seen), source.quantization
        if config is None:
            return cls(stored, {}, Meaning(), stored)
        return cls(stored, modules_of(stored), meaning(config), dequantized(stored, config))

    def smoothed_as(self, other: Model, source: Source) -> Model:
        """A plain model that is held against a quantized one of a family that is smoothed here."""
        if self.quantized or not other.quantized or source.hf_config.get("model_type") not in FAMILIES:
            return self
        folded = smoothed_as(self.plain, other.stored, source.shape)
        return Model(folded, {}, self.meaning, folded)


def compare(
    one: Source, other: Source, bound: float = 0.0, seen: tuple[dict[str, str], dict[str, str]] | None = None
) -> Iterator[Compared]:
    """`bound`: of the relative error of what is neither equal nor explained by a format. `seen`: gets digests."""
    digests = ({}, {}) if seen is None else seen
    a, b = Model.of(one, digests[0]), Model.of(other, digests[1])
    a, b = a.smoothed_as(b, one), b.smoothed_as(a, other)
    tied = bool(one.hf_config.get("tie_word_embeddings")) and bool(other.hf_config.get("tie_word_embeddings"))
    yield from _names(a, b, one, other, tied)
    both = [name for name in a.plain.specs if name in b.plain.specs]
    stored, plain = (a.stored.open(), b.stored.open()), (a.plain.open(), b.plain.open())
    with Progress("compared", sum(a.plain.specs[name].nbytes for name in both)) as progress:
        for name in both:
            yield _compared(name, a, b, stored, plain, bound)
            progress.add(a.plain.specs[name].nbytes)


def _names(a: Model, b: Model, one: Source, other: Source, tied: bool) -> Iterator[Compared]:
    for name in sorted(a.plain.specs.keys() ^ b.plain.specs.keys()):
        if name.endswith(HARMLESS) or (tied and name == TIED_COPY and EMBEDDING in a.plain.specs):
            continue
        where = other.path if name in a.plain.specs else one.path
        yield Compared(name, Verdict.missing, 1.0, f"{where} lacks it")


def _compared(name: str, a: Model, b: Model, stored: tuple[Get, Get], plain: tuple[Get, Get], bound: float) -> Compared:
    shapes = [model.plain.specs[name].shape for model in (a, b)]
    if shapes[0] != shapes[1]:
        return Compared(name, Verdict.differs, 1.0, f"shapes {list(shapes[0])} and {list(shapes[1])}")
    module = part_of(name)[0]
    held = [name.endswith(".weight") and module in model.quantized for model in (a, b)]
    if all(held) and sorted(a.quantized[module]) == sorted(b.quantized[module]):
        names = a.quantized[module]
        if all(digest(stored[0](part)) == digest(stored[1](part)) for part in names):
            return Compared(name, Verdict.equal)
    elif held[0] != held[1]:
        model, get, other = (a, stored[0], plain[1]) if held[0] else (b, stored[1], plain[0])
        parts = {part_of(part)[1]: get(part) for part in model.quantized[module]}
        return _within(name, other(name), parts, model.meaning, bound)
    return _plain(name, plain[0](name), plain[1](name), bound)


def _plain(name: str, one: torch.Tensor, other: torch.Tensor, bound: float) -> Compared:
    if one.dtype == other.dtype and digest(one) == digest(other):
        return Compared(name, Verdict.equal)
    if one.dtype != other.dtype:
        narrow = min((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).bits)
        if torch.equal(one.to(narrow), other.to(narrow)):
            return Compared(name, Verdict.rounded, said=f"{one.dtype} and {other.dtype}")
    error = _relative((one.float() - other.float()).square().sum(), one.float().square().sum())
    return Compared(name, Verdict.within_the_bound if error <= bound else Verdict.differs, error)


def _within(
    name: str, plain_OI: torch.Tensor, parts: Mapping[str, torch.Tensor], known: Meaning, bound: float
) -> Compared:
    squared = whole = torch.zeros(())
    beyond = 0
    for some in portions(tuple(plain_OI.shape), known):
        values_OI, half_steps = restore(parts, some, tuple(plain_OI.shape), known)
        original_OI = plain_OI[some].float()
        distance_OI = (values_OI - original_OI).abs()
        allowed_OI = half_steps() * 1.0001 + original_OI.abs() * ROUNDING
        beyond += int((~(distance_OI <= allowed_OI)).sum())  # a NaN is beyond
        squared, whole = squared + distance_OI.square().sum(), whole + original_OI.square().sum()
    error = _relative(squared, whole)
    if beyond:
        said = f"{beyond} of {plain_OI.numel()} values are further off than rounding takes them"
        return Compared(name, Verdict.within_the_bound if error <= bound else Verdict.differs, error, said)
    return Compared(name, Verdict.within_a_step, error)


def _relative(squared: torch.Tensor, whole: torch.Tensor) -> float:
    return float((squared / whole.clamp(min=1e-24)).sqrt())
