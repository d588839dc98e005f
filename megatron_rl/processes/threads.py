"""Thread helpers: daemon threads, an asyncio loop in a thread, pauses between pieces of work,
OpenMP helpers, core affinity.

A thread that has once computed with torch keeps OpenMP's helpers. If a process has more of them
than cores, none spins any more, and each small operation waits 30 to 60 us for its helpers
(docs/experiments/benchmarks.md).
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
SHUT_S = 5.0  # for tasks that still run on an event loop
MEANWHILE_S = 1.0


def limit_new_threads_to_one_core() -> None:
    """Limit threads that first compute with torch after this call: they inherit a thread's
    setting.
    """
    import torch

    torch.get_num_threads()  # fixes the number of this thread
    setter = threading.Thread(target=torch.set_num_threads, args=(1,))
    setter.start()
    setter.join()


def use_all_cores() -> None:
    """Bind this thread to all cores of this process: vLLM binds the main thread to one core."""
    if sys.platform.startswith("linux"):
        cores: set[int] = set()
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # the thread has ended
                cores |= os.sched_getaffinity(int(thread))
        os.sched_setaffinity(0, cores)


def in_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread: the process does not wait for it at exit."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled from here on

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Throttle:
    """Throttle of a thread, called between two pieces of its work."""

    def __init__(self, share: float) -> None:
        """`share`: of a core; 1: no pauses."""
        self.rested = 0.0  # in seconds
        self._rest = 1 / share - 1
        self._worked = 0.0
        self._hurry = threading.Event()

    def __call__(self) -> None:
        begun = time.monotonic()
        self._hurry.wait((time.thread_time() - self._worked) * self._rest)
        self._worked = time.thread_time()
        self.rested += time.monotonic() - begun

    def hurry(self) -> None:
        """Stop throttling."""
        self._hurry.set()


class EventLoopThread:
    """Asyncio event loop in a thread of its own, for synchronous callers."""

    def __init__(self, name: str, ended: Callable[[], Exception]) -> None:
        """`ended`: makes the exception for callers that wait at the loop's end, or call after
        it.
        """
        self.ended = ended
        self._loop = asyncio.new_event_loop()
        # later calls would never run
        self._stopping = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; the returned future can be used and cancelled from any thread."""
        with self._lock:
            if self._stopping:
                coroutine.close()
                raise self.ended()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return the result; an interrupt of the caller cancels it."""
        future = self.submit(coroutine)
        try:
            while not wait([future], MEANWHILE_S).done:
                self.check()
            return future.result()
        except CancelledError:
            raise self.ended() from None
        except BaseException:
            future.cancel()
            raise

    def check(self) -> None:
        """Raise if the thread has ended: tasks that could not be cancelled in time are dropped."""
        if not self._thread.is_alive():
            raise self.ended()

    def stop(self) -> None:
        """Cancel running tasks, then end the thread; safe to call twice."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(SHUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SHUT_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    await cancel_all(asyncio.all_tasks() - {asyncio.current_task()}, SHUT_S / 2)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]], timeout_s: float | None = None) -> None:
    """Cancel tasks and wait for their end."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    if cancelled:
        await asyncio.wait(cancelled, timeout=timeout_s)


async def tracked(
    work: Awaitable[T], running: set[asyncio.Future[Any]], cancelled: Callable[[], Exception]
) -> T:
    """Await work as a task of the set `running`; raise `cancelled()` if the task is cancelled
    there. Cancelling the caller cancels the work.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(_retrieve)
    running.add(task)
    try:
        await asyncio.wait([task])
    finally:
        running.discard(task)
        task.cancel()
    if task.cancelled():
        raise cancelled()
    return task.result()


def _retrieve(task: asyncio.Future[Any]) -> None:
    """Mark an exception as retrieved, or asyncio would warn."""
    if not task.cancelled():
        task.exception()
