"""Ctrl-C while a program only starts or ends: exit status 130 at once, without a traceback.

An import that an exception interrupts cannot be repeated, and its library may report something else.
"""

import atexit
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT


def leave_at_once() -> None:
    """Let Ctrl-C end the process from now on, unless it is ignored or handled already."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # a thread, which may not
            signal.signal(signal.SIGINT, _leave)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process in this block, which imports."""
    # registered first, called last: Python then takes its handlers away, and would die of the signal
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
    leave_at_once()
    yield
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def status_of_interrupt() -> int:
    """Exit status for a KeyboardInterrupt that was caught."""
    exec("")  # Python remembers one that hit such a text, of a dataclass, and would die of the signal
    return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
