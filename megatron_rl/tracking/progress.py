"""Progress of a run: training counts, the run.stop condition, the checkpoint schedule."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_rl.checkpoint.checkpoints import Checkpoint, DriverState, best_of
from megatron_rl.config.schema import CheckpointSection
from megatron_rl.tracking.metrics_file import as_numbers, decode_line, encode_line
from megatron_rl.types import Metrics

if TYPE_CHECKING:
    from megatron_rl.batch import Share


def reached(stop: Metrics | None, evaluated: Metrics) -> str | None:
    """Reason to end the run early: an evaluation has reached run.stop."""
    for metric, least in (stop or {}).items():
        if metric in evaluated and evaluated[metric] >= least:
            return f"{metric} reached {evaluated[metric]:.3f}, run.stop is {least:g}"
    return None


@dataclass(frozen=True)
class Seen:
    """Counts of trained data."""

    samples: int = 0
    tokens: int = 0

    def after(self, share: Share) -> Seen:
        trained = share.replicas.sum(share.batch.mask_N.sum())
        return Seen(samples=self.samples + len(share.all), tokens=self.tokens + int(trained))

    def metrics(self, share: Share, step: int) -> Metrics:
        batch = share.batch
        staleness_B = (step - 1 - share.all.versions_B).clamp(min=0).float()
        spanning = {}
        if batch.versions_N is not None:
            first_N = batch.responses.at_tokens(batch.versions_B)
            changed_N = (batch.versions_N != first_N) & batch.mask_N
            changed_B = batch.responses.count(changed_N) > 0
            spanning["rollout/spanning_fraction"] = float(
                share.everywhere(changed_B).float().mean()
            )
        return {
            "progress/samples": self.samples,
            "progress/tokens": self.tokens,
            "rollout/staleness_mean": float(staleness_B.mean()),
            "rollout/staleness_max": float(staleness_B.max()),
            **spanning,
        }


@dataclass(frozen=True)
class Progress:
    """State after `step`: a run begins with it, or resumes with a checkpoint's part of it."""

    step: int = 0
    seen: Seen = Seen()
    position: int | None = 0  # in the order of prompts; rank 0's
    # metrics known before the sync and the evaluation; None: already written
    line: Metrics | None = field(default_factory=dict)

    def kept(self) -> dict[str, Any]:
        """The part that a checkpoint keeps, as JSON."""
        line = None
        if self.line is not None:
            line = encode_line(as_numbers(self.line))
        return {"position": self.position, "seen": asdict(self.seen), "line": line}

    @staticmethod
    def of(step: int, kept: DriverState) -> Progress:
        line = None
        if kept.line is not None:
            line = decode_line(kept.line)
        return Progress(step, Seen(**kept.seen), kept.position, line)


class SaveSchedule:
    """Schedule of checkpoints, and the best one so far; on rank 0, since the clock decides too."""

    def __init__(self, section: CheckpointSection, resumed: Checkpoint | None) -> None:
        self._section = section
        self._saved_at = time.monotonic()
        self._best: float | None = None
        if resumed and (best := best_of(resumed.path.parent, section.best)):
            self._best = best[1]

    def due(
        self, step: int, kept: Mapping[str, Any], evaluated: Metrics, ending: bool
    ) -> dict[str, Any] | None:
        """Return the manifest's part about rank 0; None if no checkpoint is due."""
        section = self._section
        if not section.every:
            return None
        value = evaluated.get(section.best or "")
        better = value is not None and (self._best is None or value > self._best)
        due = ending or better
        if section.steps and step % section.steps == 0:
            due = True
        if section.minutes and time.monotonic() - self._saved_at >= 60 * section.minutes:
            due = True
        if not due:
            return None
        self._saved_at = time.monotonic()
        if better:
            self._best = value
        about: dict[str, Any] = {"driver": dict(kept)}
        if value is not None:
            about["best"] = [section.best, value]
        return about
