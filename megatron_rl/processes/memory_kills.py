"""Out-of-memory kills by the kernel, read from its counters for each control group.

A group counts whom a limit has ended, and whom the whole machine's shortage has. Where no group counts, nobody knows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")


class MemoryKills:
    """Processes that the kernel has ended in this one's control group (a run's others are in it) since it was made."""

    def __init__(self) -> None:
        self._before = count()

    def any(self) -> bool:
        return count() > self._before


def count(groups: Path = GROUPS, own: Path = OWN) -> int:
    """How many the kernel has ended so far; 0 where nobody counts."""
    for path in _counters(groups, own):
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.M)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def _counters(groups: Path, own: Path) -> Iterator[Path]:
    """Files in which this process's control group may keep its count: of both versions, seen from inside or not."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.oom_control"
        elif not controllers:
            root, name = groups, "memory.events"
        else:
            continue
        yield root / path.lstrip("/") / name
        yield root / name
