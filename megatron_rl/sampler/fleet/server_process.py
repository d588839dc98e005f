"""Starting and ending one vLLM server on this machine, under a key; bound to the loopback interface by default."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.config.fleet import LOOPBACK, devices
from megatron_rl.processes.owned_folder import current
from megatron_rl.processes.process import ALL_CORES, for_the_driver_alone
from megatron_rl.processes.scratch import remove_with_it
from megatron_rl.sampler.engine_process import (
    SHARED_MEMORY,
    end_group,
    engine_environment,
    log_tail,
    remove_segments,
    segments_of_session,
    share_of_cores,
)
from megatron_rl.sampler.engine_settings import EngineSettings, engine_arguments, write_engine_folder

EVERYWHERE = ("0.0.0.0", "::")
END_GRACE_S = 4.0  # for workers to release the memory that they share

_SERVER_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that move weights exist in this mode only
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # the fleet hangs up first: a connection never ends under a request
}
_SERVER_ARGUMENTS = {
    "tokens_only": True,  # token ids in, token ids out
    "uvicorn_log_level": "warning",
    "disable_uvicorn_access_log": True,
}


@dataclass(frozen=True)
class ServerSettings:
    """Everything that the start of one server needs, and that a restart needs again."""

    arguments: Mapping[str, Any]  # of the engine
    log_path: Path | None  # None: this process's own output
    socket_dir: Path  # of vLLM's own processes among themselves
    port: int | None  # None: a free one
    devices: str | None
    workers: int
    cores: str = ALL_CORES
    host: str = LOOPBACK


def server_settings(
    settings: EngineSettings, hf_folder: Path, folder: Path, log_dir: Path, worker_extension: str
) -> list[ServerSettings]:
    """Settings of each server that the run starts, in the order of formats."""
    fleet, gpus = settings.sampler.fleet, devices(settings.sampler)
    servers = []
    for index, format in enumerate(settings.formats[: fleet.replicas]):
        own = settings.with_format(format)
        engine_folder = write_engine_folder(hf_folder, folder / format.value, own.quantization)
        servers.append(
            ServerSettings(
                arguments=engine_arguments(own, engine_folder, worker_extension),
                log_path=log_dir / f"sampler_{index}.log",
                socket_dir=current() or folder,
                port=None,
                devices=gpus[index] if gpus else None,
                workers=settings.sampler.tensor_parallel,
                cores=share_of_cores(index, fleet.replicas),
            )
        )
    return servers


class ServerProcess:
    """The process group of one server."""

    def __init__(self, settings: ServerSettings, key: str) -> None:
        self.settings = settings
        self._segments: set[str] = set()
        self.port = settings.port or free_port()
        arguments = {**settings.arguments, **_SERVER_ARGUMENTS, "host": settings.host, "port": self.port}
        command = [sys.executable, "-m", "megatron_rl.engine.server", str(os.getpid()), settings.cores]
        environment = engine_environment(settings.workers, settings.devices, settings.cores) | _SERVER_VARIABLES
        environment |= {"VLLM_API_KEY": key, "VLLM_RPC_BASE_PATH": str(settings.socket_dir)}
        with _opened(settings.log_path) as log, for_the_driver_alone():
            self._process = subprocess.Popen(
                [*command, *command_line(arguments)],
                stdin=subprocess.PIPE,  # its end is the server's end
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def note_shared_memory(self) -> None:
        """Note the memory that its processes share now: a server that is killed leaves it behind."""
        found = segments_of_session(self.pid) - self._segments
        self._segments |= found
        remove_with_it(SHARED_MEMORY / name for name in found)

    @property
    def address(self) -> str:
        host = LOOPBACK if self.settings.host in EVERYWHERE else self.settings.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"its process ended (exit status {code})"

    def wait(self, seconds: float) -> int | None:
        """Its exit status, once it has one."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def end(self) -> None:
        """End the server and its engine; safe in any state."""
        self.note_shared_memory()
        has_workers = self.settings.workers > 1
        if has_workers and self._process.poll() is None:
            self._process.terminate()
        end_group(self._process, END_GRACE_S if has_workers else 0.0)
        remove_segments(self._segments)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def log_end(self) -> str:
        return log_tail(self.settings.log_path) if self.settings.log_path else ""


@contextlib.contextmanager
def _opened(log_path: Path | None) -> Iterator[BinaryIO | None]:
    if log_path is None:
        yield None
        return
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        yield log


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """Keyword arguments of `vllm.LLM` as options of the server."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            words += [f"--{option}", json.dumps(value) if isinstance(value, (dict, list)) else str(value)]
    return words


def free_port() -> int:
    """A port that nobody uses now. Should somebody take it first, the server ends and is started again on another."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return probe.getsockname()[1]
