"""Python stacks of another process: asked for by a signal, read from the run's temporary folder, no
debugger needed.
"""

import faulthandler
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from megatron_rl.processes.folder_lock import current

SHOW_STACKS = signal.SIGUSR2
WAIT_S = 2.0
SETTLED_S = 0.1


def show_on_request() -> None:
    """Called early by a process that may be asked. What it shows goes to the run's own temporary
    folder, else to standard error.
    """
    folder = current()
    if folder is None:
        file = sys.stderr
    else:
        file = path_of(folder, os.getpid()).open("w")
    faulthandler.register(SHOW_STACKS, file=file, all_threads=True)


def ask(pid: int, folder: Path) -> str:
    """The stacks of its threads, the main one's first; "" where it does not show them in the run's
    temporary folder.
    """
    path = path_of(folder, pid)
    if not (path.exists() and _listens(pid)):
        return ""
    before = _size(path)
    with suppress(OSError):
        os.kill(pid, SHOW_STACKS)
    deadline = time.monotonic() + WAIT_S
    seen = before
    while time.monotonic() < deadline:
        time.sleep(SETTLED_S)
        if (size := _size(path)) > before and size == seen:
            break
        seen = size
    with suppress(OSError):
        return "\n\n".join(
            reversed(path.read_bytes()[before:].decode(errors="replace").strip().split("\n\n"))
        )
    return ""


def path_of(folder: Path, pid: int) -> Path:
    return folder / f"stacks-{pid}"


def _listens(pid: int) -> bool:
    """Whether the signal would not end it: it has a handler, which may also be a library's that
    would (LLVM's).
    """
    with suppress(OSError):
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.M)
        return found is not None and bool(int(found[1], 16) >> (SHOW_STACKS - 1) & 1)
    return False


def _size(path: Path) -> int:
    if path.exists():
        return path.stat().st_size
    return 0
