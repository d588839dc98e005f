"""Work beside other work on the same cores: a thread that takes a share of one core, until somebody waits for it."""

from __future__ import annotations

import threading
import time


class Pace:
    """Called by a thread between two pieces of its work: it rests."""

    def __init__(self, share: float) -> None:
        """`share`: of a core; 1: no rests."""
        self.rested = 0.0  # seconds
        self._rest, self._worked = 1 / share - 1, 0.0
        self._hurry = threading.Event()

    def __call__(self) -> None:
        begun = time.monotonic()
        self._hurry.wait((time.thread_time() - self._worked) * self._rest)
        self._worked = time.thread_time()
        self.rested += time.monotonic() - begun

    def hurry(self) -> None:
        """No more rests."""
        self._hurry.set()
