"""Ctrl-C while a program only starts or ends: exit status 130 at once, without a traceback.

An import that an exception interrupts cannot be repeated, and its library may report something
else.
"""

import atexit
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal
from types import FrameType

INTERRUPTED = 128 + SIGINT


def leave_at_once() -> None:
    """Let Ctrl-C end the process from now on, unless it is ignored or handled already."""
    if getsignal(SIGINT) is default_int_handler:
        with suppress(ValueError):  # ValueError outside the main thread
            signal(SIGINT, _leave)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process in this block of imports."""
    # registered first, called last: Python then removes its handlers, and the signal would kill it
    atexit.register(signal, SIGINT, SIG_IGN)
    leave_at_once()
    yield
    if getsignal(SIGINT) is _leave:
        signal(SIGINT, default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(INTERRUPTED)
