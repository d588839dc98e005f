"""Where a run stands: what it has trained on, and what is still to be said of its last step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from megatron_rl.config.schema import RunSection
from megatron_rl.runs.metrics_file import decode_line, encode_line
from megatron_rl.types import Batch


def reached(run: RunSection, evaluated: Mapping[str, float]) -> str | None:
    for metric, least in (run.stop or {}).items():
        if metric in evaluated and evaluated[metric] >= least:
            return f"{metric} reached {evaluated[metric]:.3f}, run.stop is {least:g}"
    return None


@dataclass(frozen=True)
class Seen:
    """How much has been trained on."""

    samples: int = 0
    tokens: int = 0

    def after(self, batch: Batch) -> Seen:
        return replace(self, samples=self.samples + len(batch), tokens=self.tokens + int(batch.mask_BT.sum()))

    def metrics(self, batch: Batch, step: int) -> dict[str, float]:
        staleness_B = (step - 1 - batch.versions_B).clamp(min=0).float()
        spanning = {}
        if batch.versions_BT is not None:
            changed_BT = (batch.versions_BT != batch.versions_B[:, None]) & batch.mask_BT
            spanning["rollout/spanning_fraction"] = float(changed_BT.any(dim=1).float().mean())
        return {
            "progress/samples": self.samples,
            "progress/tokens": self.tokens,
            "rollout/staleness_mean": float(staleness_B.mean()),
            "rollout/staleness_max": float(staleness_B.max()),
            **spanning,
        }


@dataclass(frozen=True)
class Standing:
    """The policy is that of `step`. A run begins, or goes on, with what a checkpoint keeps of this."""

    step: int = 0
    seen: Seen = Seen()
    position: int | None = 0  # in the order of prompts; rank 0's
    # of metrics, as far as it is known before the sync and the evaluation; None: it is written
    line: dict[str, float] | None = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """As JSON, for `of`."""
        line = None
        if self.line is not None:
            numbers = {name: value if isinstance(value, int) else float(value) for name, value in self.line.items()}
            line = encode_line(numbers)
        return {"position": self.position, "seen": asdict(self.seen), "line": line}

    @staticmethod
    def of(step: int, kept: Mapping[str, Any]) -> Standing:
        line = kept.get("line")
        return Standing(step, Seen(**kept["seen"]), kept["position"], None if line is None else decode_line(line))
