"""`tools/convert.py verify`: two models on disk, checkpoints or folders, compared tensor by tensor.

A tensor is equal, equal but for the dtype, within a format's rounding or the requested bound,
different, or missing. A quantized weight is compared with the plain one element by element:
rounding moves a number by at most half a step, so that one swapped row, one lost scale or one stale
expert shows, however small the mean error. Smoothing divides norms by powers of two and multiplies
the weights after them; it is read off the norms and applied to the plain side first.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch import Tensor

from megatron_rl.apps.conversion import dequantized
from megatron_rl.apps.conversion.sources import Get, Source, Weights, digest
from megatron_rl.apps.conversion.work import progress
from megatron_rl.files import write_json
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import FAMILIES, ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.models.weight_files import EMBEDDING, HARMLESS, TIED_COPY
from megatron_rl.quantization.smoothing import LARGEST_EXPONENT, folded
from megatron_rl.tracking.console import table

ROUNDING = 2.0**-8  # of a plain weight that is BF16, relative
WORST = 10


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
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict not in (Verdict.differs, Verdict.missing)


class Model:
    """A side of the comparison: its weights as they are stored, and plain."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.stored = source.weights
        self.plain = self.stored
        self.quantized: dict[str, list[str]] = {}  # module -> tensors of its weight
        self.meaning = dequantized.Meaning()
        if (config := source.quantization) is not None:
            self.quantized = dequantized.modules_of(self.stored)
            self.meaning = dequantized.meaning(config)
            self.plain = dequantized.dequantized(self.stored, config)

    def smooth_as(self, other: "Model") -> None:
        """Fold a plain model of a known family as the quantized one it is held against."""
        if self.quantized or not other.quantized:
            return
        if self.source.hf_config.get("model_type") in FAMILIES:
            self.plain = _smoothed_as(self.plain, other.stored, self.source.shape)

    def open(self) -> None:
        self.get = self.plain.open()
        self.get_stored = self.stored.open()

    def quantizes(self, name: str) -> bool:
        module, suffix = dequantized.part_of(name)
        return suffix == "weight" and module in self.quantized


def compare(one: Source, other: Source, bound: float = 0.0) -> Iterator[Compared]:
    """`bound`: of the relative error of what is neither equal nor explained by a format."""
    a = Model(one)
    b = Model(other)
    a.smooth_as(b)
    b.smooth_as(a)
    tied = all(source.hf_config.get("tie_word_embeddings") for source in (one, other))
    for name in sorted(a.plain.specs.keys() ^ b.plain.specs.keys()):
        copy = tied and name == TIED_COPY and EMBEDDING in a.plain.specs
        if not copy and not name.endswith(HARMLESS):
            where = other.path if name in a.plain.specs else one.path
            yield Compared(name, Verdict.missing, 1.0, f"{where} lacks it")
    a.open()
    b.open()
    both = [name for name in a.plain.specs if name in b.plain.specs]
    for name in progress("compare", both):
        ours = a.plain.specs[name].shape
        theirs = b.plain.specs[name].shape
        if ours != theirs:
            yield Compared(name, Verdict.differs, 1.0, f"shapes {list(ours)} and {list(theirs)}")
        elif a.quantizes(name) == b.quantizes(name):
            yield _plain(name, a.get(name), b.get(name), bound)
        elif a.quantizes(name):
            yield _within(name, a, b.get(name), bound)
        else:
            yield _within(name, b, a.get(name), bound)


def _plain(name: str, one: Tensor, other: Tensor, bound: float) -> Compared:
    if one.dtype == other.dtype and digest(one) == digest(other):
        return Compared(name, Verdict.equal)
    if one.dtype != other.dtype:
        narrow = min((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).bits)
        if torch.equal(one.to(narrow), other.to(narrow)):
            return Compared(name, Verdict.rounded, reason=f"{one.dtype} and {other.dtype}")
    return _by_error(
        name, (one.float() - other.float()).square().sum(), one.float().square().sum(), bound
    )


def _within(name: str, model: Model, plain_OI: Tensor, bound: float) -> Compared:
    """`model`: has this weight quantized."""
    shape = tuple(plain_OI.shape)
    names = model.quantized[dequantized.part_of(name)[0]]
    parts = {dequantized.part_of(part)[1]: model.get_stored(part) for part in names}
    squared = torch.zeros(())
    whole = torch.zeros(())
    beyond = 0
    for some in dequantized.portions(shape, model.meaning):
        values_OI, half_steps = dequantized.restore(parts, some, shape, model.meaning)
        original_OI = plain_OI[some].float()
        distance_OI = (values_OI - original_OI).abs()
        allowed_OI = half_steps() * 1.0001 + original_OI.abs() * ROUNDING
        beyond += int((~(distance_OI <= allowed_OI)).sum())  # a NaN is beyond
        squared = squared + distance_OI.square().sum()
        whole = whole + original_OI.square().sum()
    if not beyond:
        return replace(_by_error(name, squared, whole, bound), verdict=Verdict.within_a_step)
    reason = f"{beyond} of {plain_OI.numel()} values are further off than rounding takes them"
    return _by_error(name, squared, whole, bound, reason)


def _by_error(
    name: str, squared: Tensor, whole: Tensor, bound: float, reason: str = ""
) -> Compared:
    error = float((squared / whole.clamp(min=1e-24)).sqrt())
    verdict = Verdict.within_the_bound if error <= bound else Verdict.differs
    return Compared(name, verdict, error, reason)


def _smoothed_as(plain: Weights, quantized: Weights, shape: ModelShape) -> Weights:
    """`plain`, folded as `quantized` was; as it is where that was not, or is of another model."""
    scales: dict[tuple[int, Norm], Tensor] = {}
    get = plain.open()
    other = quantized.open()
    readers: dict[str, tuple[int, Norm]] = {}
    for param in params(shape):
        if param.row.norm is None or param.layer is None:
            continue
        place = (param.layer, param.row.norm)
        name = param.hf[0]
        readers |= dict.fromkeys(param.hf, place)
        if len(param.shapes[0]) == 1 and name in plain.specs and name in quantized.specs:
            scale_H = _scale(get(name), other(name))
            if scale_H is not None:
                scales[place] = scale_H
    if not scales:
        return plain

    def made(name: str, get: Get) -> Tensor:
        scale_H = scales.get(readers[name]) if name in readers else None
        if scale_H is None:
            return get(name)
        return folded(get(name), scale_H)

    return plain.made_into(plain.specs, made)


def _scale(plain_H: Tensor, smoothed_H: Tensor) -> Tensor | None:
    """Powers of two between the two; None if they are equal or differ in another way."""
    if plain_H.shape != smoothed_H.shape or torch.equal(plain_H, smoothed_H.to(plain_H.dtype)):
        return None
    ratio_H = torch.where(plain_H == smoothed_H, 1.0, plain_H.float() / smoothed_H.float())
    exponent_H = ratio_H.log2()
    exact_H = (exponent_H == exponent_H.round()) & (exponent_H.abs() <= LARGEST_EXPONENT)
    return ratio_H if exact_H.all() else None


@dataclass(frozen=True)
class Verified:
    tensors: list[Compared]

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.tensors)

    @property
    def worst(self) -> list[Compared]:
        odd = (one for one in self.tensors if one.error or not one.ok)
        return sorted(odd, key=lambda one: (one.ok, -one.error))[:WORST]

    def text(self) -> str:
        counts = Counter(one.verdict for one in self.tensors)
        listed = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        lines = [f"{len(self.tensors)} tensors: {listed}"]
        if self.worst:
            rows = [(one.name, one.verdict, f"{one.error:.4g}", one.reason) for one in self.worst]
            lines += ["", *table(("tensor", "verdict", "relative error", ""), rows)]
        return "\n".join([*lines, "", "verified" if self.ok else "NOT VERIFIED"])

    def write(self, path: Path, sources: Sequence[Source], bound: float) -> None:
        report = {
            "verdict": "verified" if self.ok else "not verified",
            "bound": bound,
            "models": [
                {"path": str(source.path), "quantization": source.quantization}
                for source in sources
            ],
            "tensors": Counter(one.verdict.value for one in self.tensors),
            "worst": [asdict(one) for one in self.worst],
        }
        write_json(path, report)
