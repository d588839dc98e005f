"""Heartbeat of a rank: its phase, its progress and its waits, in a file for hang detection
(supervision/watch.py).

The loop reports its state (`phase`, `waiting`, `mark`); a thread writes it to a file every few
seconds.
"""

import json
import linecache
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from megatron_rl.files import JsonObject, read_json
from megatron_rl.processes.process import birth_of

FOLDER = "heartbeat"  # below the run's logs
BEAT_S = 3.0
START = "start: imports"
BETWEEN = "between phases"


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...


class Activity:
    """Current activity of this process. Other threads than the main one may call only `mark`, `own`
    and `waiting`.
    """

    def __init__(self) -> None:
        self.progress = 0
        self.entered = 0
        # of the main thread, and of another: see `waiting`
        self._waits: dict[bool, JsonObject | None] = {True: None, False: None}
        self._delegated = False
        self._phases: list[str] = []
        self.outside = START  # what this process does outside of phases
        self._owned: list[tuple[str, Process]] = []
        self._owning = threading.Lock()

    def mark(self) -> None:
        """Note progress."""
        self.progress += 1

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phases.append(name)
        self.outside = BETWEEN
        self.entered += 1
        self.mark()
        try:
            yield
        finally:
            self._phases.pop()
            self.mark()

    def between(self, what: str) -> None:
        """Name what follows, outside of phases, up to the next phase."""
        self.outside = what
        self.mark()

    @contextmanager
    def waiting(self, whom: str, limit_s: float) -> Iterator[None]:
        """Record a wait of this process: for processes whose names begin with `whom`, for at most
        `limit_s` seconds.
        """
        main = threading.current_thread() is threading.main_thread()
        before = self._waits[main]
        self._waits[main] = {"whom": whom, "limit_s": limit_s}
        self.mark()
        try:
            yield
        finally:
            self._waits[main] = before
            self.mark()

    @contextmanager
    def delegate_wait(self) -> Iterator[None]:
        """Report another thread's wait as this process's, while the main thread waits for it."""
        self._delegated = True
        try:
            yield
        finally:
            self._delegated = False

    def own(self, name: str, process: Process) -> None:
        """Add a process that was started here, until it has ended."""
        with self._owning:
            self._owned = [(kept, one) for kept, one in self._owned if one.returncode is None]
            self._owned.append((name, process))

    @property
    def owned(self) -> list[tuple[str, int]]:
        return [(name, one.pid) for name, one in self._owned if one.returncode is None]

    def as_fields(self) -> JsonObject:
        return {
            "phase": self._phases[-1] if self._phases else self.outside,
            "entered": self.entered,
            "progress": self.progress,
            "waits": self._waits[not self._delegated],
            "children": [{"name": name, "pid": pid} for name, pid in self.owned],
        }


ACTIVITY = Activity()
mark = ACTIVITY.mark
phase = ACTIVITY.phase
between = ACTIVITY.between
waiting = ACTIVITY.waiting
own = ACTIVITY.own
delegate_wait = ACTIVITY.delegate_wait


class Heartbeat:
    """Thread that writes `logs/heartbeat/rank_N.json`, once there is such a folder."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.each: list[Callable[[], object]] = []  # callbacks at every heartbeat
        self._path = file_of(run_dir, rank)
        self._rank = rank
        self._count = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self) -> None:
        """Write the last heartbeat of this rank."""
        self._end.set()
        self._thread.join(BEAT_S)

    def _run(self) -> None:
        while not self._end.is_set():
            self.beat()
            for call in list(self.each):
                with suppress(Exception):  # any exception: the next heartbeat tries again
                    call()
            self._end.wait(BEAT_S)
        self.beat(ended=True)

    def beat(self, ended: bool = False) -> None:
        self._count += 1
        content = {
            "rank": self._rank,
            "host": platform.node(),
            "pid": os.getpid(),
            "birth": birth_of(os.getpid()),
            "beat": self._count,
            "ended": ended,
            "in_collective": _in_collective(),
            **ACTIVITY.as_fields(),
        }
        new = self._path.with_suffix(".new")
        # the folder is created at the start of the run; a failed heartbeat must not end the run
        with suppress(OSError):
            new.write_text(json.dumps(content), encoding="utf-8")
            new.replace(self._path)


def file_of(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / FOLDER / f"rank_{rank}.json"


def phase_of(run_dir: Path, rank: int) -> str:
    """Return the phase of a rank's last heartbeat."""
    with suppress(ValueError, KeyError):
        return str(read_json(file_of(run_dir, rank))["phase"])
    return START


def _in_collective() -> bool:
    """True if a thread is in a collective, or waits for one that it has started."""
    for frame in sys._current_frames().values():
        name = frame.f_code.co_filename
        if "/torch/distributed/" in name:
            return True
        line = linecache.getline(name, frame.f_lineno)
        if "/megatron/core/" in name and ".wait(" in line:
            return True
    return False
