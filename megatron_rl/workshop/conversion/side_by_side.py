"""The work of a conversion in a few threads: reading, rounding, hashing and writing all leave the interpreter free."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from threading import Event
from typing import TypeVar

import torch

MOST = 2  # threads: each holds what belongs to one parameter, and a disk is busy with two
Job = TypeVar("Job")
Result = TypeVar("Result")
GoOn = Callable[[], None]


class Stopped(Exception):
    """The others have, too."""


def side_by_side(work: Callable[[Job, GoOn], Result], jobs: Sequence[Job]) -> list[Result]:
    """The result of `work(job, go_on)` for each job. `go_on` raises when another one has failed, or all are to end."""
    stop, threads = Event(), torch.get_num_threads()

    def go_on() -> None:
        if stop.is_set():
            raise Stopped

    share = max(1, threads // _count())
    try:
        with ThreadPoolExecutor(_count(), "conversion", torch.set_num_threads, (share,)) as pool:
            running = [pool.submit(work, job, go_on) for job in jobs]
            try:
                for one in as_completed(running):
                    one.result()
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [one.result() for one in running]
    finally:
        torch.set_num_threads(threads)  # what a thread has set is what later ones begin with


def shared_out(sizes: Mapping[str, int]) -> list[list[str]]:
    """Names that follow on each other, about as many bytes for each thread."""
    runs: list[list[str]] = [[] for _ in range(_count())]
    total, before = max(sum(sizes.values()), 1), 0
    for name, nbytes in sizes.items():
        middle = before + nbytes / 2
        runs[min(int(middle * len(runs) / total), len(runs) - 1)].append(name)
        before += nbytes
    return [run for run in runs if run]


def _count() -> int:
    return min(MOST, len(os.sched_getaffinity(0)))
