"""Starting and ending one vLLM server on this machine, under a key; bound to the loopback interface by default."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron_rl.config.fleet import KEY_VARIABLE, LOOPBACK, replica_formats
from megatron_rl.config.schema import Config
from megatron_rl.engine import server_key
from megatron_rl.engine.server import ALL_CORES
from megatron_rl.sampler import embedded, model_folder

END_GRACE_S = 4.0  # for workers to release the memory that they share
REAP_S = 5.0

# the routes that move weights exist in this mode only; server_key.RequireKey guards them
_SERVER_VARIABLES = {"VLLM_SERVER_DEV_MODE": "1"}
_SERVER_ARGUMENTS = {
    "tokens_only": True,  # token ids in, token ids out
    "middleware": "megatron_rl.engine.server_key.RequireKey",
    "uvicorn_log_level": "warning",
    "disable_uvicorn_access_log": True,
}


@dataclass(frozen=True)
class ServerPlan:
    """Everything that a start of one server needs, and that a restart needs again."""

    arguments: Mapping[str, Any]  # of the engine
    log_path: Path | None  # None: this process's own output
    socket_dir: Path  # of vLLM's own processes among themselves
    cores: str
    port: int | None
    devices: str | None
    workers: int
    host: str = LOOPBACK
    hidden: str | None = None  # a variable of this process's environment that is none of the server's business


def server_plans(
    config: Config, hf_folder: Path, folder: Path, log_dir: Path, worker_extension: str
) -> list[ServerPlan | None]:
    """One per server of the fleet, in the order of formats; None for servers that are given by address."""
    fleet = config.sampler.fleet
    plans: list[ServerPlan | None] = []
    for index, format in enumerate(replica_formats(config.sampler, config.quantization)[: fleet.replicas]):
        own = replace(config, quantization=replace(config.quantization, format=format))
        engine_folder = model_folder.write_engine_folder(hf_folder, folder / format.value, own)
        plans.append(
            ServerPlan(
                arguments=model_folder.engine_arguments(own, engine_folder, worker_extension),
                log_path=log_dir / f"sampler_{index}.log",
                socket_dir=folder,
                cores=share_of_cores(index, fleet.replicas),
                port=None,
                devices=fleet.devices[index] if fleet.devices else None,
                workers=config.sampler.tensor_parallel,
                hidden=KEY_VARIABLE,
            )
        )
    return plans + [None] * len(fleet.addresses)


class ServerProcess:
    """The process group of one server."""

    def __init__(self, plan: ServerPlan, key: str) -> None:
        self.plan = plan
        self.port = plan.port or free_port()
        self._waits_for_workers = plan.workers > 1
        arguments = {**plan.arguments, **_SERVER_ARGUMENTS, "host": plan.host, "port": self.port}
        command = [sys.executable, "-m", "megatron_rl.engine.server", str(os.getpid()), plan.cores]
        environment = embedded.engine_environment() | _SERVER_VARIABLES
        environment.pop(plan.hidden or "", None)
        environment |= {server_key.VARIABLE: key, "VLLM_RPC_BASE_PATH": str(plan.socket_dir)}
        environment |= embedded.visible_devices(plan.devices)
        if plan.cores != ALL_CORES and plan.workers > 1:
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": _shares(plan.cores, plan.workers)}
        elif plan.cores == ALL_CORES:
            environment |= embedded.thread_binding(plan.workers)
        with _opened(plan.log_path) as log:
            self._process = subprocess.Popen(
                [*command, *command_line(arguments)],
                stdin=subprocess.PIPE,  # its end is the server's end
                stdout=log,
                stderr=None if log is None else subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        return None if code is None else f"its process ended (exit status {code})"

    def wait(self) -> int:
        return self._process.wait()

    def end(self) -> None:
        """End the server and its engine; safe in any state."""
        if self._waits_for_workers and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the server may be gone, its engine not yet
        self._process.wait(REAP_S)
        if self._process.stdin is not None:
            self._process.stdin.close()

    def log_end(self) -> str:
        return embedded.log_tail(self.plan.log_path) if self.plan.log_path else ""


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


def share_of_cores(index: int, servers: int) -> str:
    """This machine's cores, divided among the servers that are started on it."""
    cores = sorted(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else []
    share = len(cores) // servers
    if servers == 1 or share == 0:
        return ALL_CORES
    return ",".join(map(str, cores[index * share : (index + 1) * share]))


def _shares(cores: str, workers: int) -> str:
    """Cores for each worker of one server, as vLLM spells them."""
    listed = cores.split(",")
    share = max(1, len(listed) // workers)
    return "|".join(",".join(listed[i * share % len(listed) :][:share]) for i in range(workers))
