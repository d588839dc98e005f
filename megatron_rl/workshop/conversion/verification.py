"""`tools/convert.py verify`: whether two models on disk, each a checkpoint or a folder, are one, by
every tensor and, on texts, by their logprobs; `quantize` judges modelopt's export by its tensors.

A tensor is equal, equal but for the dtype, within a format's rounding or the bound asked for,
different, or missing. A quantized weight is held against the plain one element by element: rounding
moves a number by half a step at the most, so that one swapped row, one lost scale or one stale
expert shows, however small the mean error. Smoothing, which divides norms by powers of two and
multiplies what reads them, is read off the norms, and done to the plain side first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from megatron_rl.files import write_whole
from megatron_rl.models.mapping import params
from megatron_rl.models.shape import FAMILIES, ModelShape
from megatron_rl.models.table import Norm
from megatron_rl.models.weight_files import EMBEDDING, HARMLESS, TIED_COPY
from megatron_rl.quantization.smoothing import LARGEST_EXPONENT, folded
from megatron_rl.runs.console import table
from megatron_rl.weight_sync.probe import ProbeResult
from megatron_rl.weight_sync.probe import compare as compare_logprobs
from megatron_rl.workshop.conversion import dequantized
from megatron_rl.workshop.conversion.calibration import (
    Rows,
    batch_of,
    learner_at,
    token_rows,
    transformers_model,
)
from megatron_rl.workshop.conversion.sources import Get, Source, Weights, digest, note

ROUNDING = 2.0**-8  # of a plain weight that is BF16, relative
# nats, mean |d|
PLAIN_GATE = 0.02
QUANTIZED_GATE = 0.08
WORST = 10
Scores = list[torch.Tensor]  # of each row, its first token left out


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


class Model:
    """A side of the comparison: its weights as they are stored, and plain."""

    def __init__(self, source: Source) -> None:
        config = source.quantization
        self.source = source
        self.stored = source.weights
        # by module
        if config is None:
            self.quantized = {}
        else:
            self.quantized = dequantized.modules_of(self.stored)
        if config is None:
            self.meaning = dequantized.Meaning()
        else:
            self.meaning = dequantized.meaning(config)
        if config is None:
            self.plain = self.stored
        else:
            self.plain = dequantized.dequantized(self.stored, config)

    def smooth_as(self, other: Model) -> None:
        """Fold a plain model that is held against a quantized one of a family that is smoothed
        here.
        """
        if (
            not self.quantized
            and other.quantized
            and self.source.hf_config.get("model_type") in FAMILIES
        ):
            self.plain = _smoothed_as(self.plain, other.stored, self.source.shape)


def compare(one: Source, other: Source, bound: float = 0.0) -> Iterator[Compared]:
    """`bound`: of the relative error of what is neither equal nor explained by a format."""
    a = Model(one)
    b = Model(other)
    a.smooth_as(b)
    b.smooth_as(a)
    tied = all(source.hf_config.get("tie_word_embeddings") for source in (one, other))
    for name in sorted(a.plain.specs.keys() ^ b.plain.specs.keys()):
        if not name.endswith(HARMLESS) and not (
            tied and name == TIED_COPY and EMBEDDING in a.plain.specs
        ):
            where = other.path if name in a.plain.specs else one.path
            yield Compared(name, Verdict.missing, 1.0, f"{where} lacks it")
    gets = [(model.stored.open(), model.plain.open()) for model in (a, b)]
    both = [name for name in a.plain.specs if name in b.plain.specs]
    for name in track(both, "compare", console=Console(stderr=True)):
        shapes = [list(model.plain.specs[name].shape) for model in (a, b)]
        module = dequantized.part_of(name)[0]
        held = [name.endswith(".weight") and module in model.quantized for model in (a, b)]
        if shapes[0] != shapes[1]:
            yield Compared(name, Verdict.differs, 1.0, f"shapes {shapes[0]} and {shapes[1]}")
        elif held[0] == held[1]:
            yield _plain(name, gets[0][1](name), gets[1][1](name), bound)
        else:
            model, (get, _), (_, other_get) = (
                (a, gets[0], gets[1]) if held[0] else (b, gets[1], gets[0])
            )
            parts = {dequantized.part_of(part)[1]: get(part) for part in model.quantized[module]}
            yield _within(name, other_get(name), parts, model.meaning, bound)


def _plain(name: str, one: torch.Tensor, other: torch.Tensor, bound: float) -> Compared:
    if one.dtype == other.dtype and digest(one) == digest(other):
        return Compared(name, Verdict.equal)
    if one.dtype != other.dtype:
        narrow = min((one.dtype, other.dtype), key=lambda dtype: torch.finfo(dtype).bits)
        if torch.equal(one.to(narrow), other.to(narrow)):
            return Compared(name, Verdict.rounded, said=f"{one.dtype} and {other.dtype}")
    return _by_error(
        name, (one.float() - other.float()).square().sum(), one.float().square().sum(), bound
    )


def _within(
    name: str,
    plain_OI: torch.Tensor,
    parts: Mapping[str, torch.Tensor],
    known: dequantized.Meaning,
    bound: float,
) -> Compared:
    squared = whole = torch.zeros(())
    beyond = 0
    for some in dequantized.portions(tuple(plain_OI.shape), known):
        values_OI, half_steps = dequantized.restore(parts, some, tuple(plain_OI.shape), known)
        original_OI = plain_OI[some].float()
        distance_OI = (values_OI - original_OI).abs()
        allowed_OI = half_steps() * 1.0001 + original_OI.abs() * ROUNDING
        beyond += int((~(distance_OI <= allowed_OI)).sum())  # a NaN is beyond
        squared = squared + distance_OI.square().sum()
        whole = whole + original_OI.square().sum()
    if beyond:
        said = f"{beyond} of {plain_OI.numel()} values are further off than rounding takes them"
    else:
        said = ""
    found = _by_error(name, squared, whole, bound, said)
    if beyond:
        return found
    return replace(found, verdict=Verdict.within_a_step)


def _by_error(
    name: str, squared: torch.Tensor, whole: torch.Tensor, bound: float, said: str = ""
) -> Compared:
    error = float((squared / whole.clamp(min=1e-24)).sqrt())
    return Compared(
        name, Verdict.within_the_bound if error <= bound else Verdict.differs, error, said
    )


def _smoothed_as(plain: Weights, quantized: Weights, shape: ModelShape) -> Weights:
    """`plain`, folded as `quantized` was; as it is where that was not, or is of another model."""
    scales: dict[tuple[int, Norm], torch.Tensor] = {}
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

    def made(name: str, get: Get) -> torch.Tensor:
        scale_H = scales.get(readers[name]) if name in readers else None
        if scale_H is None:
            return get(name)
        return folded(get(name), scale_H)

    return plain.made_into(plain.specs, made)


def _scale(plain_H: torch.Tensor, smoothed_H: torch.Tensor) -> torch.Tensor | None:
    """Powers of two between the two; None where they are equal, or anything else is between
    them.
    """
    if plain_H.shape != smoothed_H.shape or torch.equal(plain_H, smoothed_H.to(plain_H.dtype)):
        return None
    ratio_H = torch.where(plain_H == smoothed_H, 1.0, plain_H.float() / smoothed_H.float())
    exponent_H = ratio_H.log2()
    exact = bool((exponent_H == exponent_H.round()).all()) and bool(
        (exponent_H.abs() <= LARGEST_EXPONENT).all()
    )
    return ratio_H if exact else None


@dataclass(frozen=True)
class Verified:
    tensors: list[Compared]
    logprobs: ProbeResult | None = None

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.tensors) and (self.logprobs is None or self.logprobs.ok)

    def text(self) -> str:
        counts = Counter(one.verdict for one in self.tensors)
        lines = [
            f"{len(self.tensors)} tensors: "
            + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
        ]
        if worst := self.worst():
            rows = [(one.name, one.verdict.value, f"{one.error:.4g}", one.said) for one in worst]
            lines += ["", *table(("tensor", "verdict", "relative error", ""), rows)]
        if found := self.logprobs:
            far = (
                f"mean |d| {found.mean_abs:.5f}, largest {found.max_abs:.4f}, gate {found.budget:g}"
            )
            lines += ["", f"logprobs: {far}: {'ok' if found.ok else 'TOO FAR'}"]
        return "\n".join([*lines, "", "verified" if self.ok else "NOT VERIFIED"])

    def worst(self) -> list[Compared]:
        odd = (one for one in self.tensors if one.error or not one.ok)
        return sorted(odd, key=lambda one: (one.ok, -one.error))[:WORST]

    def write(self, path: Path, sources: Sequence[Source], **asked: Any) -> None:
        """Writes the report as JSON."""
        said = {
            "verdict": "verified" if self.ok else "not verified",
            "asked": asked,
            "models": [
                {"path": str(source.path), "quantization": source.quantization}
                for source in sources
            ],
            "tensors": Counter(one.verdict.value for one in self.tensors),
            "worst": [asdict(one) for one in self.worst()],
            "logprobs": None
            if self.logprobs is None
            else {"ok": self.logprobs.ok, **vars(self.logprobs)},
        }
        write_whole(path, json.dumps(said, indent=1) + "\n")


def verify(one: Source, other: Source, prompts: str | None, bound: float) -> Verified:
    """`prompts`: texts to score with both models, as `token_rows` takes them."""
    if prompts is None:
        return Verified(list(compare(one, other, bound)))
    for source in (one, other):
        refuse_unscored(source)
    rows = token_rows(prompts, one.folder)
    tensors = list(compare(one, other, bound))
    note(f"{prompts}: {len(rows)} texts, {sum(map(len, rows))} tokens")
    one_1T, other_1T = (torch.cat(score(source, rows))[None] for source in (one, other))
    if one.quantization is None and other.quantization is None:
        gate = PLAIN_GATE
    else:
        gate = QUANTIZED_GATE
    return Verified(
        tensors, compare_logprobs(one_1T, other_1T, torch.ones_like(one_1T, dtype=torch.bool), gate)
    )


def refuse_unscored(source: Source) -> None:
    """Refuses what transformers cannot load: it joins experts as it loads them, and expects those
    in INT8 packed.
    """
    if (quantization := source.quantization) is None:
        return
    joined = quantization.get("format") == "int-quantized" and any(
        ".experts." in name for name in source.weights.specs
    )
    if quantization.get("quant_method") != "compressed-tensors" or joined:
        raise ValueError(
            f"{source.path}: transformers runs no weights of this form; leave out --logprobs"
        )


def score(source: Source, rows: Rows) -> Scores:
    """Logprobs by transformers of a folder, by the learner of a checkpoint."""
    if source.is_folder:
        return by_transformers(source, rows)
    return by_learner(source, rows)


def by_learner(source: Source, rows: Rows) -> Scores:
    with learner_at(source) as learner:
        logprobs_BT = learner.logprobs(batch_of(rows))
    return [logprobs_BT[number, : len(row) - 1].cpu() for number, row in enumerate(rows)]


def by_transformers(source: Source, rows: Rows) -> Scores:
    model = transformers_model(source)
    found = []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logprobs_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs_TV.gather(1, ids[0, 1:, None]).squeeze(1))
    return found
