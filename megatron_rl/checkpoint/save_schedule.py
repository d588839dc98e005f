"""When a checkpoint is due, and which one is the best so far."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from megatron_rl.checkpoint.checkpoints import Checkpoint
from megatron_rl.config.schema import CheckpointSection


class SaveSchedule:
    """Rank 0's: the clock decides, too, and the other ranks have another one."""

    def __init__(self, section: CheckpointSection, resumed: Checkpoint | None) -> None:
        self._section = section
        self._saved_at = time.monotonic()
        self._best: float | None = resumed.driver.get("best") if resumed else None

    def due(
        self, step: int, kept: Mapping[str, Any], evaluated: Mapping[str, float], ending: bool
    ) -> dict[str, Any] | None:
        """What the manifest says of rank 0, where this step is to be kept."""
        section = self._section
        if not (section.every or section.minutes):
            return None
        value = evaluated.get(section.best or "")
        better = value is not None and (self._best is None or value > self._best)
        late = bool(section.minutes) and time.monotonic() - self._saved_at >= 60 * section.minutes
        if not (ending or better or late or (section.every and step % section.every == 0)):
            return None
        self._saved_at = time.monotonic()
        self._best = value if better else self._best
        about: dict[str, Any] = {"driver": {**kept, "best": self._best}}
        if value is not None:
            about["best"] = [section.best, value]
        return about
