"""`log.alarms`: which alarms a run has, what each does, where its bound is. The rules are in `runs/alarms.py`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_rl.config.bounds import as_written


class Alarm(StrEnum):
    mismatch = "mismatch"
    mismatch_jump = "mismatch_jump"
    mismatch_over_bf16 = "mismatch_over_bf16"
    probe = "probe"
    ess = "ess"
    rejected = "rejected"
    non_finite = "non_finite"
    entropy = "entropy"
    reward_errors = "reward_errors"
    no_spread = "no_spread"
    truncated = "truncated"
    aborted = "aborted"
    gradient = "gradient"


@dataclass(frozen=True)
class Setting:
    on: bool = True
    stops: bool = False  # ends the run; else it warns
    bound: float | None = None  # None: the rule's own


def setting(value: Any) -> Setting | None:
    """What a recipe says of one alarm; None where that cannot be read."""
    if value in (False, "off"):  # YAML takes a bare `off` for false
        return Setting(on=False)
    if value in ("warn", "stop"):
        return Setting(stops=value == "stop")
    if isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in ("warn", "stop"):
        ((action, bound),) = value.items()
        return Setting(stops=action == "stop", bound=float(bound)) if _is_bound(bound) else None
    return Setting(bound=float(value)) if _is_bound(value) else None


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    for name, value in given.items():
        if name not in list(Alarm):
            near = difflib.get_close_matches(str(name), list(Alarm), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            yield f"log.alarms.{name}: no alarm; {hint}there are {', '.join(Alarm)}"
        elif setting(value) is None:
            yield (
                f"log.alarms.{name} is {as_written(value)}: use off, warn, stop, a bound of 0 or more, or both, "
                "such as {stop: 0.3}"
            )
