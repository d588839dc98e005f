"""What rewards print goes to the run's log, as far as it is not too much: an answer cannot fill the disk."""

from __future__ import annotations

import io
import os
import threading

MOST_BYTES = 1 << 20  # of all workers of a run together
CHUNK = 64 << 10


class RewardLog:
    """`descriptor` is where workers print to; `close` it twice if you like."""

    def __init__(self) -> None:
        self._read, write = os.pipe()  # neither is inherited: a worker is given a copy
        self._end = io.FileIO(write, "wb")
        self._thread = threading.Thread(target=self._relay, name="reward-log", daemon=True)
        self._thread.start()

    @property
    def descriptor(self) -> int:
        return self._end.fileno()

    def _relay(self) -> None:
        """Reads on after the limit, as a worker that nobody reads would wait."""
        left = MOST_BYTES
        while data := os.read(self._read, CHUNK):
            if left > 0:
                left -= len(data)
                _write(data if left > 0 else data[: left or None] + _last_words())
        os.close(self._read)

    def close(self) -> None:
        self._end.close()
        self._thread.join(1.0)  # a program that a reward has left behind may still hold the other end


def _last_words() -> bytes:
    return f"\nrewards have printed {MOST_BYTES >> 20} MiB: what they print from here on is left out\n".encode()


def _write(data: bytes) -> None:
    try:
        while data:
            data = data[os.write(2, data) :]
    except OSError:
        pass  # a full disk is no matter of the rewards
