"""The whole proof that two folders hold one model: every tensor, and what each program computes with them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from megatron_rl.files import write_whole
from megatron_rl.runs.console import table
from megatron_rl.weight_sync.probe import ProbeResult
from megatron_rl.weight_sync.probe import compare as compare_logprobs
from megatron_rl.workshop.conversion.comparison import Compared, Verdict, compare
from megatron_rl.workshop.conversion.inspection import describe
from megatron_rl.workshop.conversion.outcome import WORST, mapping_version, versions
from megatron_rl.workshop.conversion.prompts import token_rows
from megatron_rl.workshop.conversion.scores import Program, Scores, runs, score
from megatron_rl.workshop.conversion.sources import Source
from megatron_rl.workshop.conversion.weights import content_digest, files_of

PLAIN_GATE, QUANTIZED_GATE = 0.02, 0.08  # nats, mean |d|


@dataclass(frozen=True)
class Pair:
    """Two scores of the same texts."""

    one: str
    other: str
    result: ProbeResult


@dataclass(frozen=True)
class Verified:
    tensors: list[Compared]
    pairs: list[Pair]
    skipped: list[str]
    contents: tuple[str, str]  # digests of what was read of each

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.tensors) and all(pair.result.ok for pair in self.pairs)

    def text(self) -> str:
        counts = Counter(one.verdict for one in self.tensors)
        lines = [f"{len(self.tensors)} tensors: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())]
        worst = self.worst()
        if worst:
            rows = [(one.name, one.verdict.value, f"{one.error:.4g}", one.said) for one in worst]
            lines += ["", *table(("tensor", "verdict", "relative error", ""), rows)]
        if self.pairs:
            gates = [
                (pair.one, pair.other, f"{pair.result.mean_abs:.5f}", f"{pair.result.max_abs:.4f}",
                 f"{pair.result.budget:g}", "ok" if pair.result.ok else "TOO FAR")
                for pair in self.pairs
            ]  # fmt: skip
            lines += ["", *table(("logprobs of", "and of", "mean |d|", "largest", "gate", ""), gates)]
        return "\n".join([*lines, *self.skipped, "", "verified" if self.ok else "NOT VERIFIED"])

    def worst(self) -> list[Compared]:
        odd = [one for one in self.tensors if one.verdict is not Verdict.equal and (one.error or not one.ok)]
        return sorted(odd, key=lambda one: (one.ok, -one.error))[:WORST]


def verify(
    one: Source,
    other: Source,
    prompts: str | None,
    programs: Sequence[Program],
    bound: float,
    note: Callable[[str], None],
) -> Verified:
    seen: tuple[dict[str, str], dict[str, str]] = {}, {}
    tensors = list(compare(one, other, bound, seen))
    contents = content_digest(seen[0]), content_digest(seen[1])
    if prompts is None:
        return Verified(tensors, [], [], contents)
    rows = token_rows(prompts, one.folder)
    note(f"{prompts}: {len(rows)} texts, {sum(map(len, rows))} tokens")
    scores: list[tuple[str, Source, Scores]] = []
    skipped = []
    for name, source in (("A", one), ("B", other)):
        for program in programs:
            if not runs(program, source):
                skipped.append(f"{name} was not scored by {program.value}, which takes no weights of this form")
                continue
            note(f"{name}: {program.value}")
            scores.append((f"{name}, {program.value}", source, score(program, source, rows)))
    if not scores:
        raise ValueError(f"none of {', '.join(programs)} takes either of the two")
    first, origin, reference = scores[0]
    pairs = [
        Pair(first, label, _compared(reference, found, _gate(origin, source))) for label, source, found in scores[1:]
    ]
    return Verified(tensors, pairs, skipped, contents)


def _compared(one: Scores, other: Scores, budget: float) -> ProbeResult:
    flat_one, flat_other = torch.cat(one)[None], torch.cat(other)[None]
    return compare_logprobs(flat_one, flat_other, torch.ones_like(flat_one, dtype=torch.bool), budget)


def _gate(one: Source, other: Source) -> float:
    plain = one.quantization is None and other.quantization is None
    return PLAIN_GATE if plain else QUANTIZED_GATE


def write_report(verified: Verified, sources: Sequence[Source], path: Path, **asked: Any) -> None:
    said = {
        "verdict": "verified" if verified.ok else "not verified",
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "asked": asked,
        "models": [_about(source, content) for source, content in zip(sources, verified.contents, strict=True)],
        "tensors": Counter(one.verdict.value for one in verified.tensors),
        "worst": [asdict(one) for one in verified.worst()],
        "logprobs": [
            {"of": pair.one, "and": pair.other, "ok": pair.result.ok, **vars(pair.result)} for pair in verified.pairs
        ],
        "skipped": verified.skipped,
        "mapping": mapping_version(),
        "versions": versions(),
    }
    write_whole(path, json.dumps(said, indent=1) + "\n")


def _about(source: Source, content: str) -> dict[str, Any]:
    config = source.quantization
    quantization = None if config is None else describe(config, source.folder)
    sizes = {name: size for name, (size, _) in files_of(source.path).items()}
    return {"path": str(source.path), "quantization": quantization, "content": content, "files": sizes}
