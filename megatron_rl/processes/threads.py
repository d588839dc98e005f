"""Work in a thread of its own, which ends with it.

A thread that has once computed with torch keeps OpenMP's helpers for as long as it lives. Where a process has more of
them than cores, OpenMP stops to wait awake between two operations, in all of its threads: each small operation then
waits 30 us for its helpers. (An engine whose weights had been built in a thread that stayed took 2.0 s for what takes
1.1 s with one that ends.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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
