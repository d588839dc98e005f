"""Threads: what work in one comes to, that nothing of it stays, those without helpers, those that
pace themselves.
"""

import asyncio
import os
import sys
import threading
import time

import pytest
from helpers import program

from megatron_rl.processes import threads
from megatron_rl.processes.threads import EventLoopThread, Throttle, in_thread

COUNTS = """
import os, sys, time, torch
from megatron_rl.processes.threads import in_thread

def tasks():
    return len(os.listdir("/proc/self/task"))

torch.ones(1 << 20).exp_().sum()  # this thread's helper
before = tasks()
inside = in_thread("work", lambda: (torch.ones(1 << 20).exp_().sum(), tasks())[1]).result()
until = time.monotonic() + 120
while tasks() > before and time.monotonic() < until:
    time.sleep(0.01)
print(before, inside, tasks())
"""


def test_a_result_and_an_error_come_back():
    assert in_thread("work", lambda: 7).result() == 7
    with pytest.raises(KeyError, match="what"):
        in_thread("work", lambda: {}["what"]).result()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_openmp_s_helpers_end_with_it():
    """Those that stay keep the helpers of all other threads from waiting awake."""
    before, inside, after = map(int, program(COUNTS, OMP_NUM_THREADS="2").split())
    assert inside >= before + 2  # the thread, and a helper
    assert after == before


ALONE = """
import os, threading, torch
from megatron_rl.processes.threads import limit_new_threads_to_one_core

def tasks():
    return len(os.listdir("/proc/self/task"))

def compute():
    torch.ones(1 << 20).exp_().sum()

compute()
own, before = torch.get_num_threads(), tasks()
limit_new_threads_to_one_core()
done, end = threading.Event(), threading.Event()
threading.Thread(target=lambda: (compute(), done.set(), end.wait())).start()
done.wait()
print(own, torch.get_num_threads(), before, tasks())
end.set()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_later_threads_have_no_helpers():
    own, still, before, after = map(int, program(ALONE, OMP_NUM_THREADS="2").split())
    assert own == still  # of the one that was there
    assert after == before + 1


PIECES = 10
PIECE_S = 0.01


def _working(share: float) -> tuple[Throttle, list[float], threading.Thread]:
    pace = Throttle(share)
    done = list[float]()

    def work() -> None:
        for _ in range(PIECES):
            end = time.thread_time() + PIECE_S
            while time.thread_time() < end:
                pass
            pace()
        done.append(time.thread_time())

    thread = threading.Thread(target=work)
    thread.start()
    return pace, done, thread


@pytest.mark.parametrize(("share", "times"), [(0.1, 9.0), (0.5, 1.0), (1.0, 0.0)])
def test_it_rests_as_long_as_its_share_asks(share: float, times: float) -> None:
    pace, worked, thread = _working(share)
    thread.join()
    assert pace.rested >= 0.95 * times * PIECES * PIECE_S
    assert worked[0] >= PIECES * PIECE_S


def test_who_waits_ends_its_rest() -> None:
    pace, worked, thread = _working(1e-6)  # at this pace for a day
    pace.hurry()
    thread.join(60)
    assert worked


@pytest.fixture
def many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("many_switches")
def test_a_call_to_a_stopping_event_loop_returns_a_result_or_an_error() -> None:
    """Every moment in which a call can come is met by some of so many."""

    async def one() -> int:
        await asyncio.sleep(0)
        return 1

    for _ in range(20):
        loop = EventLoopThread("test", ZeroDivisionError)
        answers = []

        def call(loop: EventLoopThread = loop, answers: list[int] = answers) -> None:
            while True:
                answers.append(loop.call(one()))

        callers = [in_thread("caller", call) for _ in range(4)]
        while not answers:
            time.sleep(0.001)
        loop.stop()
        loop.stop()
        for caller in callers:
            with pytest.raises(ZeroDivisionError):
                caller.result(60)


def test_a_wait_for_an_uncancellable_task_ends_with_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "SHUT_S", 0.2)
    loop = EventLoopThread("test", ZeroDivisionError)
    begun = threading.Event()

    async def stubborn() -> None:
        begun.set()
        while True:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    caller = in_thread("caller", lambda: loop.call(stubborn()))
    begun.wait()
    loop.stop()
    with pytest.raises(ZeroDivisionError):
        caller.result(60)
