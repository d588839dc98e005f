"""Process helpers of a run: cores, memory, garbage collection, deferred signals, signals left to
the driver, ending with the parent or with all descendants, process states, a free port,
fault-tolerant output.
"""

import ctypes
import errno
import gc
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import psutil

from megatron_rl.logs import configure
from megatron_rl.processes.interrupts import INTERRUPTED, leave_at_once

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
SIGACTION_BYTES = 1024  # more than any system's struct sigaction

# Spin count of an OpenMP thread before it sleeps. By default it spins for milliseconds at every
# barrier, and torch runs 20 times slower if another process needs the core.
SHORT_SPIN = {"GOMP_SPINCOUNT": "2000"}
ALL_CORES = "all"


def keep_to(cores: str) -> None:
    """Bind this process to cores of the machine, such as "0,1"; ALL_CORES binds it to none."""
    if cores != ALL_CORES:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})


def share_of_cores(index: int, servers: int) -> str:
    """Return an equal share of this machine's cores for each server that is started on it."""
    share = len(cores := own_cores()) // servers
    if servers == 1 or share == 0:
        return ALL_CORES
    return ",".join(cores[index * share : (index + 1) * share])


def own_cores() -> list[str]:
    if sys.platform.startswith("linux"):
        return [str(core) for core in sorted(os.sched_getaffinity(0))]
    return []


def free_port(address: str = "127.0.0.1") -> int:
    """Return an unused port. Another process may take it first; the caller then has to request
    another.
    """
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@contextmanager
def rare_collections() -> Iterator[None]:
    """Collect garbage after a million new objects, not 700: objects created by imports are
    permanent.
    """
    usual = gc.get_threshold()
    gc.set_threshold(1_000_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


def keep_freed_memory() -> None:
    """Make malloc keep freed memory for the next tensors: a page from the kernel costs a fault."""
    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)


@contextmanager
def hidden(module: str) -> Iterator[None]:
    """Make imports of a module fail meanwhile: megatron imports W&B, which creates folders, for
    unused features.
    """
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def die_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel end this process with its parent (strictly, a thread), whose process id is
    given if known.
    """
    _prctl(PR_SET_PDEATHSIG, by)
    if parent is not None and os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


LEAVE_S = 90  # from the end of a rank's work to its exit, which normally takes seconds
# "Finish the step, then stop", as schedulers request before a time limit: for the driver only.
STOP_AFTER_STEP = signal.SIGUSR1
# A rank writes its Python stacks to its log.
SHOW_STACKS = signal.SIGUSR2
# From a launcher to its ranks, and from the kernel if the launcher has died: exit at once.
AT_ONCE = signal.SIGHUP


def hold(*numbers: signal.Signals) -> None:
    """Block these signals from now on, in child processes too: they stay pending until
    `release`.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def release(*numbers: signal.Signals) -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


class LastingHandler:
    """Current handler of a signal, to be restored after native code has replaced it.

    LLVM, with which Triton compiles kernels in this process, takes USR1 for itself and drops it.
    """

    def __init__(self, number: signal.Signals) -> None:
        self._number = number
        self._action = ctypes.create_string_buffer(SIGACTION_BYTES)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.sigaction(number, None, self._action)

    def put_back(self) -> None:
        self._libc.sigaction(self._number, self._action, None)


@contextmanager
def for_the_driver_alone() -> Iterator[None]:
    """Have processes that are started meanwhile ignore Ctrl-C and the end-of-step signal from their
    start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, STOP_AFTER_STEP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_the_driver() -> None:
    """Ignore Ctrl-C, SIGTERM and USR1 from now on: the parent process signals all of its
    children.
    """
    for number in (signal.SIGINT, signal.SIGTERM, STOP_AFTER_STEP):
        signal.signal(number, signal.SIG_IGN)


def die_with_spawner() -> None:
    """End with the parent, in a process started by `multiprocessing`: vLLM's workers outlive a
    killed engine by seconds.
    """
    from multiprocessing import parent_process  # slow to import, and rarely needed

    if (spawner := parent_process()) and spawner.pid == os.getppid():
        die_with_parent(spawner.pid)


def adopt_orphans(adopts: bool = True) -> None:
    """Become the parent of orphaned descendants, so that the owner of this process can end all of
    them.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, adopts)


def _prctl(option: int, value: int) -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(option, value)


def end_own_group() -> None:
    """End this process and those that it has started, such as an engine's workers."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def end_with_descendants(pid: int) -> None:
    """Kill a child and all its descendants, including those in other sessions."""
    for each in _with_descendants(pid):
        with suppress(psutil.NoSuchProcess):
            each.kill()


def _with_descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    return []


@contextmanager
def ending_orphans(grace_s: float) -> Iterator[None]:
    """Adopt orphans of processes that are started in this block, and end them after `grace_s`."""
    this = psutil.Process()
    before = this.children()
    adopt_orphans()
    try:
        yield
    finally:
        deadline = time.monotonic() + grace_s
        while (
            left := [one for one in this.children() if one not in before]
        ) and time.monotonic() < deadline:
            psutil.wait_procs(left, timeout=0.05)
        for one in left:
            end_with_descendants(one.pid)
        psutil.wait_procs(left, timeout=0.05)
        adopt_orphans(False)


def stopped_below(pid: int) -> list[int]:
    """Return this process and its descendants that SIGSTOP or a debugger holds."""
    return [one.pid for one in _with_descendants(pid) if is_stopped(one.pid)]


def is_stopped(pid: int) -> bool:
    """True if SIGSTOP or a debugger holds a process."""
    return state_of(pid) in ("T", "t")


def state_of(pid: int) -> str:
    """Return the state of a process in one letter, as `ps` shows it; "" if it does not exist."""
    return next(iter(_stat(pid)), "")


def birth_of(pid: int) -> int:
    """Return the start time of a process in ticks since boot, which with its id identifies one
    process; 0 if it does not exist.
    """
    return int(next(iter(_stat(pid)[19:]), 0))


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name: the state comes first."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def describe_end(code: int) -> str:
    """Describe the end of a process by its exit status as its parent gets it: 3, or -9."""
    if code >= 0:
        return f"exit status {code}"
    doubt = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"ended by {signal_name(-code)}{doubt}"


def signal_name(number: int) -> str:
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"signal {number}"


COLOUR = re.compile(r"\x1b\[[\d;]*m")
# control characters, which a terminal would execute; unpaired surrogates, which no stream accepts
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return a text with its control characters as escapes, such as \\x1b, and without colours."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], COLOUR.sub("", text))


class BestEffortStream:
    """Text stream that escapes control characters, and ignores write failures.

    If its reader has exited, or its disk is full, output is lost.
    """

    def __init__(self, stream: TextIO, clean: Callable[[str], str] = printable) -> None:
        self._stream = stream
        self._clean = clean

    @property
    def rich_proxied_file(self) -> "BestEffortStream":
        """Return the stream that rich uses instead of this one: it draws with control
        characters.
        """
        return BestEffortStream(self._stream, str)

    def write(self, text: str) -> int:
        with self._unheard():
            self._stream.write(text if text == "\r" else self._clean(text))
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
            # permanently; buffered text is dropped
            if error.errno in (
                errno.EPIPE,
                errno.EIO,
            ):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, self._stream.fileno())
                os.close(null)


@contextmanager
def best_effort_output() -> Iterator[None]:
    """Ignore closed pipes and terminals in this block; escape control characters."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast("TextIO", stream and BestEffortStream(stream)) for stream in before
    )
    try:
        yield
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        sys.stdout, sys.stderr = before


def status_of(main: Callable[[], int]) -> int:
    """Return the exit status of a program's main function; 130 after Ctrl-C, without a
    traceback.
    """
    try:
        with best_effort_output():
            return main()
    except KeyboardInterrupt:
        # Python records an interrupt in a dataclass's generated code, and would die of the signal
        exec("")
        return INTERRUPTED


def run_script(main: Callable[[], int]) -> NoReturn:
    configure(sys.stderr)
    status = status_of(main)
    leave_at_once()
    sys.exit(status)


def raise_interrupt(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise KeyboardInterrupt with the name of the signal."""
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
