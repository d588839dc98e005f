"""Shared memory that an engine's processes leave behind when they are killed.

The workers of an engine share memory in segments that they remove when they end by themselves, not when they are
killed. Which segments are this engine's is read from the memory maps of its processes, never from names alone: those
of other engines look the same.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

FOLDER = Path("/dev/shm")
PROCESSES = Path("/proc")
# Python's SharedMemory, vLLM's collectives on hosts, and semaphores
NAME = re.compile(rf"{FOLDER}/((?:psm_|vllm_dist_|sem\.mp-)[^/\s]+)$", re.MULTILINE)


def segments_of_session(session: int) -> set[str]:
    """Names of the segments that processes of this session have mapped; nothing where there is no /proc."""
    found: set[str] = set()
    for folder in PROCESSES.glob("[0-9]*"):
        # a process may end at any moment, and those of other users cannot be looked at
        with contextlib.suppress(OSError):
            # after the command's name, which may hold anything: state, parent, group, session
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found |= set(NAME.findall((folder / "maps").read_text()))
    return found


def remove_segments(names: Iterable[str]) -> None:
    for name in names:
        (FOLDER / name).unlink(missing_ok=True)
