"""Limits on connections that have not shown a key: few of them at once, and little time for each.

A thousand connections that never send a header would use up the process's files, and shut out those
that hold the key.
"""

import asyncio
import resource

STRANGER_S = 10.0  # from a connection to its key
STRANGERS = 128  # at once; beyond that, the oldest one is cut
SHARE = 8  # and never more than one in so many of the files that the process may open


class Strangers:
    """Connections without a key so far, of one event loop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def add(self, transport: asyncio.Transport, seconds: float) -> None:
        """Cut this connection after so many seconds, or earlier where others crowd it out."""
        loop = asyncio.get_running_loop()
        self._open[transport] = loop.call_later(seconds, self.cut, transport)
        if len(self._open) > min(STRANGERS, descriptors() // SHARE):
            self.cut(next(iter(self._open)))

    def forget(self, transport: asyncio.Transport | None) -> None:
        """The connection has shown its key, or has ended."""
        timer = self._open.pop(transport, None) if transport else None
        if timer is not None:
            timer.cancel()

    def cut(self, transport: asyncio.Transport) -> None:
        self.forget(transport)
        transport.abort()


def descriptors() -> int:
    """Files that this process may have open."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 20
    return most
