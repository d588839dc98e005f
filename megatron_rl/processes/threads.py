"""Threads beside the one that computes: work in one that ends, and helpers that others do not get.

A thread that has once computed with torch keeps OpenMP's helpers. Where a process has more of them than cores, none
waits awake any more, and each small operation waits 30 to 60 us for its helpers (docs/benchmarks.md).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def limit_new_threads_to_one_core() -> None:
    """Those that first compute with torch after this: what a thread has set is what later ones begin with."""
    import torch

    torch.get_num_threads()  # settles what this one does
    setter = threading.Thread(target=torch.set_num_threads, args=(1,))
    setter.start()
    setter.join()


def use_all_cores() -> None:
    """Let this thread run wherever some thread of this process may: vLLM ties the main thread to a core of its own."""
    if sys.platform.startswith("linux"):
        cores: set[int] = set()
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended meanwhile
                cores |= os.sched_getaffinity(int(thread))
        os.sched_setaffinity(0, cores)


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """A daemon: a process that is told to end does not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


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
