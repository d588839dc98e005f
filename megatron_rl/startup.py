"""What makes the processes of a run start sooner, and not wait for each other once they run."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# How often an OpenMP thread looks before it sleeps. By default it spins for milliseconds at every barrier: where
# another process needs the core, torch then runs 20 times slower than with this, and without one no faster.
SHORT_SPIN = {"GOMP_SPINCOUNT": "2000"}


def collect_rarely() -> None:
    """Let garbage wait for a million new objects, instead of 700.

    Nearly all that importing vLLM or megatron makes is there to stay, and at Python's usual pace the collector
    visits it again and again: a quarter of the time that the imports take (tools/bench/imports.py).
    """
    gc.set_threshold(1_000_000, 50, 50)


@contextmanager
def rare_collections() -> Iterator[None]:
    usual = gc.get_threshold()
    collect_rarely()
    try:
        yield
    finally:
        gc.set_threshold(*usual)
