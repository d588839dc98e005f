"""What the processes of a run have in common: they start sooner, do not wait for each other, end with their parent."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO, cast

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4

# How often an OpenMP thread looks before it sleeps. By default it spins for milliseconds at every barrier: where
# another process needs the core, torch then runs 20 times slower than with this, and without one no faster.
SHORT_SPIN = {"GOMP_SPINCOUNT": "2000"}
ALL_CORES = "all"


def keep_to(cores: str) -> None:
    """Of this machine, such as "0,1", or all."""
    if cores != ALL_CORES:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


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


def keep_freed_memory() -> None:
    """What this process frees stays its own, for the next tensors: pages that come back from the kernel come as zeros,
    one fault each, and a learner's step frees and takes the same gigabytes again.
    """
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


@contextmanager
def hidden(module: str) -> Iterator[None]:
    """Whoever can do without the module does: megatron imports W&B, which makes folders, for what is not used here."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Called by the child, with the parent's process id where it knows it. Strictly, the parent is a thread."""
    _prctl(PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:  # it died before the line above
        os._exit(1)


# "Finish the step, then stop", as schedulers ask before a time limit: for the driver alone.
LEAVE_S = 90  # from a rank's last word to its end, which takes seconds where nothing else runs
STOP_AFTER_STEP = signal.SIGUSR1
# From a launcher to its ranks, and from the kernel where that is gone: there is nothing left to wait for.
AT_ONCE = signal.SIGHUP


def hold(*numbers: signal.Signals) -> None:
    """These signals wait from now on, in what is started from here too: until `release`, nothing is lost."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def release(*numbers: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@contextmanager
def for_the_driver_alone() -> Iterator[None]:
    """What is started meanwhile never hears of Ctrl-C and of the end of the step, from its first moment on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, STOP_AFTER_STEP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_driver() -> None:
    """The same for this process itself, and of SIGTERM: whoever has started it signals all of its siblings."""
    for number in (signal.SIGINT, signal.SIGTERM, STOP_AFTER_STEP):
        signal.signal(number, signal.SIG_IGN)


def die_with_spawner() -> None:
    """The same, called by what `multiprocessing` has started: vLLM's workers outlive a killed engine by seconds."""
    from multiprocessing import parent_process  # slow to import: few need it

    spawner = parent_process()
    if spawner is not None and spawner.pid == os.getppid():
        die_with_parent(spawner.pid)


def adopt_orphans() -> None:
    """Whatever this process and its children start stays its descendant, so that one who ends it can end all of it."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_own_group() -> None:
    """End this process and those that it has started, such as an engine's workers."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_with_descendants(pid: int) -> None:
    """Kills a child and every process below it, those included that left its session."""
    below = _descendants(pid)
    for each in (pid, *below):
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


@contextmanager
def ending_orphans(grace_s: float) -> Iterator[None]:
    """Around what starts processes: those that outlive their parents become this one's, and end at last.

    A reward may leave programs behind when its worker is killed, in sessions of their own. `grace_s`: to end by
    themselves.
    """
    before = _children(os.getpid())
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        deadline = time.monotonic() + grace_s
        while (left := [pid for pid in _children(os.getpid()) if pid not in before]) and time.monotonic() < deadline:
            _reap(left)
            time.sleep(0.05)
        for pid in left:
            end_with_descendants(pid)
        _reap(left)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def _reap(children: Collection[int]) -> None:
    for pid in children:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


STOPPED = ("T", "t")  # states of a process that SIGSTOP holds, or a debugger


@dataclass(frozen=True)
class Work:
    """What processes have done so far, by the kernel's books."""

    cpu_s: float
    turns: int  # how often their main threads were given a core, or gave it back
    stopped: tuple[int, ...]  # those that SIGSTOP holds


def work_below(pid: int) -> Work:
    """Of all processes below this one."""
    ticks, turns, stopped = 0, 0, []
    for each in _descendants(pid):
        if stat := _stat(each):
            ticks += sum(map(int, stat[11:15]))  # its own and its ended children's, in user and system mode
            turns += turns_of(each)
            stopped += [each] if stat[0] in STOPPED else []
    return Work(ticks / os.sysconf("SC_CLK_TCK"), turns, tuple(stopped))


def state_of(pid: int) -> str:
    """One letter, as `ps` shows it; "" where there is no such process."""
    return next(iter(_stat(pid)), "")


def birth_of(pid: int) -> int:
    """In ticks since the machine's start: with it, a process id names one process. 0 where there is none."""
    stat = _stat(pid)
    return int(stat[19]) if stat else 0


def _stat(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat: the state comes first."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def turns_of(pid: int) -> int:
    """How often this process's main thread was given a core, or gave it back; 0 where nobody counts."""
    with suppress(OSError):
        return sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())))
    return 0


def _descendants(pid: int) -> list[int]:
    """Children, their children, and so on, as Linux lists them; none where it lists none."""
    found = _children(pid)
    return found + [grandchild for child in found for grandchild in _descendants(child)]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def describe_end(code: int) -> str:
    """Of a process that has ended, from what its parent is told: 3, or -9."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    return f"ended by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"


def exit_status(code: int) -> int:
    """As a shell gives it: 128 and the number of the signal that ended the process."""
    return 128 - code if code < 0 else code


class Lasting:
    """A stream for words that need not be heard: when its reader is gone, or its disk full, work goes on without."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._unheard():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._unheard():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _unheard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good; what is still buffered goes nowhere
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


@contextmanager
def lasting_output() -> Iterator[None]:
    """Closed pipes and terminals end nothing that runs inside."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", stream and Lasting(stream)) for stream in before)  # none: closed before
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


def interrupt_by_name(number: int, frame: FrameType | None) -> None:
    """A handler: ends what goes on, and says which signal it was."""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
