"""Children that the kernel ends when their parent is gone, however it went."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Called by the child, with the parent's process id where it knows it. Strictly, the parent is a thread."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)
