"""What the processes of a run have in common: they start sooner, do not wait for each other, end with their parent."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

# How often an OpenMP thread looks before it sleeps. By default it spins for milliseconds at every barrier: where
# another process needs the core, torch then runs 20 times slower than with this, and without one no faster.
SHORT_SPIN = {"GOMP_SPINCOUNT": "2000"}


def collect_rarely() -> None:
    """Let garbage wait for a million new objects, instead of 700.

    Nearly all that importing vLLM or megatron makes is there to stay, and at Python's usual pace the collector
    visits it again and again: a quarter of the time that the imports take (tools/bench/imports.py).
    """
    gc.set_threshold(1_000_000, 50, 50)


@contextmanager
def rare_collections() -> Iterator[None]:
    usual = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Called by the child, with the parent's process id where it knows it. Strictly, the parent is a thread."""
    _prctl(PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)


def adopt_orphans() -> None:
    """Whatever this process and its children start stays its descendant, so that one who ends it can end all of it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_own_group() -> None:
    """End this process and those that it has started, such as an engine's workers."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_with_descendants(pid: int) -> None:
    """Kills a child and every process below it, those included that left its session."""
    below = _descendants(pid)
    for each in (pid, *below):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Children, their children, and so on, as Linux lists them; none where it lists none."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def describe_end(code: int) -> str:
    """Of a process that has ended, from what its parent is told: 3, or -9."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"ended by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def exit_status(code: int) -> int:
    """As a shell gives it: 128 and the number of the signal that ended the process."""
    return 128 - code if code < 0 else code
