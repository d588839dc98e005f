"""Running one function as every rank of a small group, each in a fresh process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from typing import Any


def exit_codes(run_rank: Callable[..., None], arguments: Sequence[tuple[Any, ...]], timeout_s: float) -> list[Any]:
    """One process for each tuple of arguments; None stands for one that did not end in time, and is killed."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=run_rank, args=own) for own in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    return codes
