"""`tools/convert.py verify`: whether two folders hold one model, by every tensor and, on texts, by their logprobs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_rl.files import write_whole
from megatron_rl.runs.console import table
from megatron_rl.weight_sync.probe import ProbeResult
from megatron_rl.weight_sync.probe import compare as compare_logprobs
from megatron_rl.workshop.conversion.calibration import Rows, batch_of, learner_at, token_rows, transformers_model
from megatron_rl.workshop.conversion.comparison import Compared, compare
from megatron_rl.workshop.conversion.sources import Source, note

PLAIN_GATE, QUANTIZED_GATE = 0.02, 0.08  # nats, mean |d|
WORST = 10
Scores = list[torch.Tensor]  # of each row, its first token left out


@dataclass(frozen=True)
class Verified:
    tensors: list[Compared]
    logprobs: ProbeResult | None = None

    @property
    def ok(self) -> bool:
        return all(one.ok for one in self.tensors) and (self.logprobs is None or self.logprobs.ok)

    def text(self) -> str:
        counts = Counter(one.verdict for one in self.tensors)
        lines = [f"{len(self.tensors)} tensors: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())]
        if worst := self.worst():
            rows = [(one.name, one.verdict.value, f"{one.error:.4g}", one.said) for one in worst]
            lines += ["", *table(("tensor", "verdict", "relative error", ""), rows)]
        if found := self.logprobs:
            far = f"mean |d| {found.mean_abs:.5f}, largest {found.max_abs:.4f}, gate {found.budget:g}"
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
            "models": [{"path": str(source.path), "quantization": source.quantization} for source in sources],
            "tensors": Counter(one.verdict.value for one in self.tensors),
            "worst": [asdict(one) for one in self.worst()],
            "logprobs": None if self.logprobs is None else {"ok": self.logprobs.ok, **vars(self.logprobs)},
        }
        write_whole(path, json.dumps(said, indent=1) + "\n")


def verify(one: Source, other: Source, prompts: str | None, bound: float) -> Verified:
    """`prompts`: texts to score with both models, as `token_rows` takes them."""
    if prompts is None:
        return Verified(list(compare(one, other, bound)))
    for source in (one, other):
        refuse_unscored(source)
    tensors, rows = list(compare(one, other, bound)), token_rows(prompts, one.folder)
    note(f"{prompts}: {len(rows)} texts, {sum(map(len, rows))} tokens")
    one_1T, other_1T = (torch.cat(score(source, rows))[None] for source in (one, other))
    gate = PLAIN_GATE if one.quantization is None and other.quantization is None else QUANTIZED_GATE
    return Verified(tensors, compare_logprobs(one_1T, other_1T, torch.ones_like(one_1T, dtype=torch.bool), gate))


def refuse_unscored(source: Source) -> None:
    """Refuses what transformers cannot load: it joins experts as it loads them, and expects those in INT8 packed."""
    if (quantization := source.quantization) is None:
        return
    joined = quantization.get("format") == "int-quantized" and any(".experts." in name for name in source.weights.specs)
    if quantization.get("quant_method") != "compressed-tensors" or joined:
        raise ValueError(f"{source.path}: transformers runs no weights of this form; leave out --logprobs")


def score(source: Source, rows: Rows) -> Scores:
    """Logprobs by transformers of a folder, by the learner of a checkpoint."""
    return by_transformers(source, rows) if source.is_folder else by_learner(source, rows)


def by_learner(source: Source, rows: Rows) -> Scores:
    with learner_at(source) as learner:
        logprobs_BT = learner.logprobs(batch_of(rows))
    return [logprobs_BT[number, : len(row) - 1].cpu() for number, row in enumerate(rows)]


def by_transformers(source: Source, rows: Rows) -> Scores:
    model, found = transformers_model(source), []
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row])
            logprobs_TV = model(ids).logits[0, :-1].float().log_softmax(-1)
            found.append(logprobs_TV.gather(1, ids[0, 1:, None]).squeeze(1))
    return found
