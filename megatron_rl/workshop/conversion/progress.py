"""How far a conversion is: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bar

EVERY_S = 2.0


class Progress:
    """A context manager; `add` may come from any thread."""

    def __init__(self, verb: str, nbytes: int) -> None:
        self._verb, self._total, self._done = verb, nbytes, 0
        self._started = self._shown = time.monotonic()
        self._lock = threading.Lock()
        console = Console(stderr=True)
        self._bar: Bar | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
            self._bar = Bar(*columns, TimeRemainingColumn(), console=console, transient=True)
            self._task = self._bar.add_task(verb, total=nbytes)

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._bar is not None:
                self._bar.update(self._task, completed=self._done)
            elif time.monotonic() - self._shown >= EVERY_S:
                self._say()

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            self._say()

    def _say(self) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        size = f"{self._done / 2**20:.1f} of {self._total / 2**20:.1f} MiB"
        print(f"{self._verb} {size}, {seconds:.0f} s", file=sys.stderr)
