"""Engine process on this machine, embedded or a server: start (environment, cores, GPUs) and end.

The workers of an engine share memory in segments that they remove at an orderly exit, not when they
are killed. The segments of this engine are read from the memory maps of its processes, never from
names alone: other engines use the same names.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.config.fleet import LOOPBACK
from megatron_rl.files import last_lines
from megatron_rl.processes import process, scratch
from megatron_rl.processes.environment import compiled_code, without_secrets
from megatron_rl.processes.gpu_driver import VISIBLE, visible
from megatron_rl.processes.process import ALL_CORES, SHORT_SPIN, describe_end
from megatron_rl.sampler.client.interface import SamplerError

LOG_LINES_SHOWN = 15
# vLLM prints a traceback if there is no tokenizer, although none is needed
ROUTINE = re.compile(r"(\([^)]*\) )?(DEBUG|INFO|WARNING) \d\d-\d\d |\[W\d{4} |.*resource_tracker")
WORKER_DIED = re.compile(r"Worker proc (\S+) died unexpectedly \(exit code: (-?\d+|None)\)")
REAP_S = 5.0
END_GRACE_S = 4.0  # for workers to release the memory that they share
EVERYWHERE = ("0.0.0.0", "::")
BINDING = "VLLM_CPU_OMP_THREADS_BIND"

# an engine gets neither the learner's rendezvous and thread limits nor any secrets
_DROPPED_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "ROLE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "OMP_WAIT_POLICY",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "GOMP_SPINCOUNT",
        "GOMP_CPU_AFFINITY",
        "MKL_NUM_THREADS",
        "CUDA_DEVICE_MAX_CONNECTIONS",
    }
)
_ENGINE_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the child itself
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
} | SHORT_SPIN


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of an engine's start, kept for its restarts."""

    arguments: Mapping[str, Any]  # of vLLM's engine
    log_path: Path | None  # None: this process's own output
    workers: int = 1
    devices: str | None = None
    cores: str = ALL_CORES
    listens: bool = False  # serves a port; otherwise it is reached by its socket
    host: str = LOOPBACK
    port: int | None = None  # None: a free one


class EngineProcess:
    """Process group of one engine: a child reached by its socket, or a server that listens at a
    port.

    The engine ends with its socket, and with the thread that has started it.
    """

    def __init__(self, settings: ProcessSettings, key: str = "", restarts: int = 0) -> None:
        self.settings = settings
        self._segments: set[str] = set()
        self.port = settings.port or (process.free_port() if settings.listens else 0)
        self.log_path = settings.log_path
        if self.log_path is not None and restarts and not settings.listens:
            self.log_path = self.log_path.with_stem(f"{self.log_path.stem}_{restarts}")
        self.line, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            f"megatron_rl.engine.{'server' if settings.listens else 'child'}",
        ]
        command += [str(theirs.fileno()), str(os.getpid()), settings.cores]
        environment = engine_environment(settings.workers, settings.devices, settings.cores)
        if settings.listens:
            command += [settings.host, str(self.port)]
            environment |= {"VLLM_API_KEY": key}
        with theirs, _opened(self.log_path) as log, process.for_the_driver_alone():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        if self.settings.host in EVERYWHERE:
            host = LOOPBACK
        else:
            host = self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def ended(self) -> str | None:
        """Describe the end of the process; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        how = lost_worker(self.log_path) or (describe_end(code) if code < 0 else "")
        return f"its process ended (exit status {code}){f': {how}' if how else ''}"

    def wait(self, seconds: float) -> int | None:
        """Return its exit status once it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def note_shared_memory(self) -> None:
        """Note the memory that its workers share: a killed engine leaves it behind."""
        if self.settings.workers > 1:
            found = scratch.segments_of_session(self.pid) - self._segments
            self._segments |= found
            scratch.remove_with_it(scratch.SHARED_MEMORY / name for name in found)

    def end(self) -> None:
        """End the engine and its workers; safe in any state."""
        self.note_shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait(REAP_S)
        scratch.remove_segments(self._segments)

    def log_end(self) -> str:
        if self.log_path:
            return log_tail(self.log_path)
        return ""


@contextlib.contextmanager
def _opened(log_path: Path | None) -> Iterator[BinaryIO | None]:
    if log_path is None:
        yield None
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        yield log


def engine_environment(
    workers: int = 1, devices: str | None = None, cores: str = ALL_CORES
) -> dict[str, str]:
    """Return this process's environment without the learner's variables, plus the engine's share of
    the machine.
    """
    inherited = {
        name: value
        for name, value in without_secrets(os.environ).items()
        if name not in _DROPPED_VARIABLES and not name.startswith("TORCHELASTIC_")
    }
    # FP8 block kernels are compiled at first use, by a toolkit that nodes may lack
    inherited.setdefault("VLLM_USE_DEEP_GEMM", "0")
    # read when torch is loaded, which may be before the process is bound to its cores
    if cores == ALL_CORES:
        threads = {}
    else:
        threads = {"OMP_NUM_THREADS": str(max(1, len(cores.split(",")) // workers))}
    shares = threads | thread_binding(workers, cores)
    return inherited | compiled_code() | _ENGINE_VARIABLES | shares | visible_devices(devices)


def thread_binding(workers: int, cores: str = ALL_CORES) -> dict[str, str]:
    """Assign cores to each worker of a CPU engine: vLLM's default wants a memory node per
    worker.
    """
    listed = process.own_cores() if cores == ALL_CORES else cores.split(",")
    if workers == 1 or (cores == ALL_CORES and (len(listed) < workers or BINDING in os.environ)):
        return {}
    share = max(1, len(listed) // workers)
    return {
        BINDING: "|".join(
            ",".join(listed[i * share % len(listed) :][:share]) for i in range(workers)
        )
    }


def visible_devices(wanted: str | None) -> dict[str, str]:
    """Return the engine's GPUs, as indices into those visible to this process (as CUDA counts
    them).
    """
    if wanted is None:
        return {}
    seen = visible()
    chosen = [int(device) for device in wanted.split(",")]
    if seen is not None and max(chosen) >= len(seen):
        raise SamplerError(
            f"sampler.devices: {wanted!r}, but this job sees {len(seen)} GPUs "
            f"({VISIBLE}={','.join(seen)})"
        )
    return {VISIBLE: ",".join(str(device) if seen is None else seen[device] for device in chosen)}


def log_tail(path: Path) -> str:
    """Return the last lines of an engine's log, without progress messages."""
    return "\n".join(
        [line for line in last_lines(path, 1000) if not ROUTINE.match(line)][-LOG_LINES_SHOWN:]
    )


def lost_worker(path: Path | None) -> str:
    """Name the worker that has died, by the log; "" if none. The engine's own errors are a
    consequence.
    """
    if path is None:
        return ""
    died = [found for line in last_lines(path, 1000) if (found := WORKER_DIED.search(line))]
    if not died:
        return ""
    # None: the worker was found dead before its exit status was known
    name, code = died[0].groups()
    end = "terminated" if code == "None" else describe_end(int(code))
    return f"the engine's worker {name} was {end}"
