"""Work in a thread of its own: what it comes to, and that nothing of it stays. Threads that get no helpers."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from megatron_rl.processes.threads import in_thread, use_all_cores

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
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True, env=environment, check=True)
    before, inside, after = map(int, done.stdout.split())
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
    environment = os.environ | {"OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, env=environment, check=True)
    own, still, before, after = map(int, done.stdout.split())
    assert own == still  # of the one that was there
    assert after == before + 1


def test_it_does_not_hold_a_process_back():
    work = (
        "from megatron_rl.processes.threads import in_thread; import time; in_thread('work', lambda: time.sleep(999))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", work], check=True, env=environment, timeout=240)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for threads")
def test_a_thread_that_ends_meanwhile_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of an engine come and go: one that is listed may be gone when its cores are asked for."""
    everywhere, gone = os.sched_getaffinity(0), str(2**22)  # larger than any thread's number
    monkeypatch.setattr(os, "listdir", lambda _: [str(threading.get_native_id()), gone])
    os.sched_setaffinity(0, {min(everywhere)})
    monkeypatch.setattr(os, "sched_getaffinity", _asked(os.sched_getaffinity, everywhere))
    use_all_cores()
    monkeypatch.undo()
    assert os.sched_getaffinity(0) == everywhere


def _asked(ask: Callable[[int], set[int]], cores: set[int]) -> Callable[[int], set[int]]:
    """Cores of a thread that may use all, where there is such a thread."""
    return lambda thread: ask(thread) and cores
