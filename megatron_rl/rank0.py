"""Rank 0's part of the loop besides learning: samples, scores, records. Every rank calls the same
methods; rank 0 runs the driver and broadcasts results.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar

from megatron_rl.driver import Driver
from megatron_rl.processes import heartbeat
from megatron_rl.supervision.stop_request import Ranks, ask_driver

T = TypeVar("T")


class Rank0:
    """Proxy of the driver on every rank; `driver` is None on all ranks but the first."""

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self._ranks: Ranks | None = None

    def connect(self, ranks: Ranks) -> None:
        """Set the ranks to which results are broadcast."""
        self._ranks = ranks

    def ask(self, question: Callable[[Driver], T]) -> T:
        """Return the driver's result on every rank, or raise StepAborted on every rank."""
        assert self._ranks is not None
        answer: T = ask_driver(self._ranks, lambda: self.only(question))
        return answer

    def only(self, work: Callable[[Driver], T]) -> T | None:
        """Run work of the driver that other ranks do not wait for; returns None there."""
        return None if self._driver is None else work(self._driver)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self._driver is None:
            return heartbeat.phase(name)
        return self._driver.recorder.phase(name)

    def syncing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._driver is None else self._driver.syncing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.only(lambda driver: driver.__exit__(*error))
