"""The collector is slowed down where a process imports an engine, and nowhere else."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers import program

from megatron_rl.processes.process import for_the_driver_alone, rare_collections, release


@rare_collections()
def failing_import() -> None:
    assert gc.get_threshold()[0] > 100_000
    raise ImportError


def test_the_usual_pace_is_restored_after_any_exit() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        with pytest.raises(ImportError):
            failing_import()
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*usual)


@pytest.mark.fault(
    "USR1 and Ctrl-C reach an engine or a reward worker in its first moment", "it goes on"
)
def test_a_child_is_deaf_to_what_is_the_driver_s_business() -> None:
    release(signal.SIGUSR1, signal.SIGINT)
    with for_the_driver_alone():
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        for number in (signal.SIGUSR1, signal.SIGINT):
            child.send_signal(number)
        time.sleep(0.2)
        assert child.poll() is None
        child.terminate()
        assert child.wait(120) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGINT}


@pytest.mark.fault(
    "the parent dies before its child has asked to die with it", "the child ends by itself"
)
@pytest.mark.parametrize("name", ["rank", "engine.child", "engine.server", "rewards.worker"])
def test_no_orphan_of_the_first_second(name: str) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    read, write = os.pipe()  # which stays open: its end is not what ends the child
    parent = str(gone.pid)
    words = {
        "rank": ["nowhere", parent],
        "engine.child": [str(read), parent, "all"],
        "engine.server": [str(read), parent, "all", "127.0.0.1", "1"],
        "rewards.worker": [str(read), parent],
    }
    command = [sys.executable, "-m", f"megatron_rl.{name}", *words[name]]
    child = subprocess.Popen(
        command, stdin=read, pass_fds=[read], stderr=subprocess.PIPE, text=True
    )
    assert child.communicate(timeout=120)[1] == ""
    assert child.returncode == 1
    os.close(read)
    os.close(write)


FAULTS = """
import resource, sys
from megatron_rl.processes.process import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(1 << 26)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
usual = faults()
keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_memory_that_was_freed_is_taken_again_without_faults() -> None:
    usual, kept = map(int, program(FAULTS).split())
    assert kept < usual / 10
