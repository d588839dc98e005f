"""Rank 0's part of the loop beside learning: samples, scores, records. Every rank calls the same
methods; rank 0 has the driver and answers.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Self, TypeVar

from megatron_rl.driver import Driver
from megatron_rl.processes import heartbeat
from megatron_rl.supervision.stop_request import Ranks, ask_driver

T = TypeVar("T")


class Rank0:
    """The driver as every rank sees it; `driver` is None on all ranks but the first."""

    def __init__(self, driver: Driver | None) -> None:
        self._driver = driver
        self._ranks: Ranks | None = None

    def join(self, ranks: Ranks) -> None:
        """Answers reach these ranks from now on."""
        self._ranks = ranks

    def ask(self, question: Callable[[Driver], T]) -> T:
        """The driver's answer, on every rank; or, on every rank, that the step is given up."""
        assert self._ranks is not None
        answer: T = ask_driver(self._ranks, lambda: self.only(question))
        return answer

    def only(self, work: Callable[[Driver], T]) -> T | None:
        """Work of the driver that other ranks neither wait for nor hear of: None there."""
        return None if self._driver is None else work(self._driver)

    def phase(self, name: str) -> AbstractContextManager[None]:
        if self._driver is None:
            return heartbeat.phase(name)
        return self._driver.recorder.phase(name)

    def syncing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._driver is None else self._driver.syncing()

    def note(self, line: str) -> None:
        self.only(lambda driver: driver.recorder.note(line))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.only(lambda driver: driver.__exit__(*error))
