"""An asyncio event loop in a thread of its own, for callers that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, wait
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 5.0
MEANWHILE_S = 1.0


class EventLoopThread:
    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], meanwhile: Callable[[], None] = lambda: None) -> T:
        """Run to the end and return the result; an interrupt of the caller cancels it.

        `meanwhile` is called in the caller's thread every now and then, for what cannot wait for a long call's end.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            while not wait([future], MEANWHILE_S).done:
                meanwhile()
            return future.result()
        except CancelledError:
            raise RuntimeError("the event loop was stopped meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs, then end the thread; safe to call twice."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=STOP_S / 2) if others else None
