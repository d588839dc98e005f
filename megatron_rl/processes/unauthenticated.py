"""Limits on unauthenticated connections: their number, and the time of each.

A thousand connections that never send a header would exhaust the process's files, and lock out
authenticated clients.
"""

import asyncio
import resource

UNAUTHENTICATED_S = 10.0  # from a connection to its key
MAX_OPEN = 128  # at once; beyond that, the oldest one is closed
SHARE = 8  # and at most this fraction of the files that the process may open


class UnauthenticatedConnections:
    """Unauthenticated connections of one event loop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def add(self, transport: asyncio.Transport, seconds: float) -> None:
        """Close this connection after the timeout, or earlier if there are too many."""
        loop = asyncio.get_running_loop()
        self._open[transport] = loop.call_later(seconds, self.cut, transport)
        if len(self._open) > min(MAX_OPEN, descriptors() // SHARE):
            self.cut(next(iter(self._open)))

    def forget(self, transport: asyncio.Transport | None) -> None:
        """Remove a connection that has shown its key, or has ended."""
        timer = self._open.pop(transport, None) if transport else None
        if timer is not None:
            timer.cancel()

    def cut(self, transport: asyncio.Transport) -> None:
        self.forget(transport)
        transport.abort()


def descriptors() -> int:
    """Return the number of files that this process may open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 20
    return most
