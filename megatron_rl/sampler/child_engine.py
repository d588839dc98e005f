"""The embedded engine's process as its parent sees it: started, asked one thing at a time, ended.

A child, because vLLM and Megatron each want the process's threads, distributed state and signal handlers for
themselves. It is started in its own session, so that Ctrl-C in a terminal reaches the parent alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.config.fleet import devices
from megatron_rl.processes.channel import Channel, ChannelClosed, channel_pair
from megatron_rl.processes.process import describe_end, for_the_driver_alone
from megatron_rl.processes.pulse import own, waiting
from megatron_rl.processes.scratch import remove_with_it
from megatron_rl.sampler.engine_process import end_group, engine_environment, log_tail, lost_worker
from megatron_rl.sampler.engine_settings import EngineSettings, engine_arguments
from megatron_rl.sampler.model_folder import write_engine_folder
from megatron_rl.sampler.protocol import SamplerError
from megatron_rl.sampler.shared_memory import FOLDER, remove_segments, segments_of_session
from megatron_rl.weight_sync.manifest import WeightSyncError

ENGINE = "engine"  # in what is said of it
CLOSE_GRACE_S = 3.0
WORKERS_GRACE_S = 4.0


class EngineDied(SamplerError):
    """Its process has ended by itself, or one of its workers has."""


class ChildEngine:
    """Start it from a thread that outlives it: the kernel ties the child to that thread."""

    def __init__(self, settings: EngineSettings, hf_folder: Path, log_path: Path, worker_extension: str) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._settings, self._section = settings, settings.sampler
        self._hf_folder = hf_folder
        self._log_path = log_path
        self._worker_extension = worker_extension
        self._channel: Channel | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._requests = 0
        self._starting = False  # launched, and nobody has waited for it yet
        self._segments: set[str] = set()  # shared memory of the engine's processes

    def launch(self) -> None:
        """Start the child without waiting for its engine."""
        self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-engine-")
        folder = write_engine_folder(self._hf_folder, Path(self._folder.name), self._settings.quantization)
        arguments = engine_arguments(self._settings, folder, self._worker_extension)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        channel, theirs = channel_pair()
        with theirs, self._log_path.open("ab") as log, for_the_driver_alone():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.engine.child", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=engine_environment(self._section.tensor_parallel, next(iter(devices(self._section)), None)),
                start_new_session=True,
            )
        own(ENGINE, self.process)
        self._channel = channel
        self._send("start", arguments)
        self._starting = True

    def wait_ready(self) -> None:
        if self._starting:
            self._starting = False
            self._receive("start", self._section.start_timeout_s, "sampler.start_timeout_s")
            self._note_segments()

    def call(self, method: str, **arguments: Any) -> Any:
        """The answer to one of `engine.child`'s requests."""
        self.wait_ready()
        self._send(method, arguments)
        return self._receive(method, self._section.request_timeout_s, "sampler.request_timeout_s")

    def close(self) -> None:
        """Stop the child and its workers; safe to call twice and in any state."""
        self._note_segments()
        if self._channel is not None:
            self._ask_workers_to_end()
            self._channel.close()  # the child kills its group at the end of the stream
            self._channel = None
        if self.process is not None:
            end_group(self.process, CLOSE_GRACE_S)
            self.process = None
            remove_segments(self._segments)
            self._segments = set()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _send(self, method: str, arguments: dict[str, Any]) -> None:
        if self._channel is None:
            raise SamplerError("the sampler is not running: it was never started, was closed, or failed before")
        self._requests += 1
        try:
            self._channel.send({"id": self._requests, "method": method, "arguments": arguments})
        except ChannelClosed:
            self._wait_briefly()
            raise self._failure(f"the sampler's process ended before `{method}`", EngineDied) from None

    def _receive(self, method: str, timeout_s: float, key: str) -> Any:
        """Wait for the reply; every way in which none comes ends the child and names its log."""
        if self._channel is None:
            raise SamplerError("the sampler is not running: it was closed, or failed before")
        try:
            with waiting(ENGINE, timeout_s, key):
                reply = self._channel.receive(timeout_s)
        except TimeoutError:
            raise self._failure(f"the sampler did not answer `{method}` within {key}={timeout_s:g}") from None
        except ChannelClosed:
            self._wait_briefly()
            raise self._failure(f"the sampler's process ended during `{method}`", EngineDied) from None
        except BaseException:
            self.close()  # an interrupt in mid-answer leaves a stream that cannot be read on
            raise
        if "error" in reply:
            raise self._error(method, reply["error"])
        return reply["value"]

    def _error(self, method: str, error: dict[str, str]) -> Exception:
        if error["type"] == WeightSyncError.__name__:
            return WeightSyncError(error["message"])
        lost = lost_worker(self._log_path)
        message = f"`{method}` failed in the sampler: {lost or error['type'] + ': ' + error['message']}"
        if lost or method == "start":
            return self._failure(message, EngineDied if lost else SamplerError)
        return SamplerError(f"{message} (log: {self._log_path})")

    def _failure(self, message: str, kind: type[SamplerError] = SamplerError) -> SamplerError:
        """Close, and put the end of the child's log under the message."""
        process = self.process
        by_itself = process is not None and process.poll() is not None
        self.close()
        if process is not None and process.returncode is not None:
            message += f" (exit status {process.returncode})"
            message += f": {describe_end(process.returncode)}" if by_itself and process.returncode < 0 else ""
        tail = log_tail(self._log_path)
        return kind(f"{message}. The end of {self._log_path}:\n{tail}" if tail else f"{message}; see {self._log_path}")

    def _wait_briefly(self) -> None:
        """A process closes its sockets a moment before it has ended."""
        with suppress(subprocess.TimeoutExpired):
            if self.process is not None:
                self.process.wait(CLOSE_GRACE_S)

    def _note_segments(self) -> None:
        """Only workers share memory; which of it is theirs can be seen while they live."""
        if self.process is not None and self._section.tensor_parallel > 1:
            found = segments_of_session(self.process.pid) - self._segments
            self._segments |= found
            remove_with_it(FOLDER / name for name in found)

    def _ask_workers_to_end(self) -> None:
        """Workers of a larger engine share memory that only they release; a single process needs no such wait."""
        if self._section.tensor_parallel == 1 or self.process is None or self._channel is None:
            return
        try:
            self._channel.send({"id": 0, "method": "shutdown", "arguments": {}})
            self.process.wait(WORKERS_GRACE_S)
        except (ChannelClosed, subprocess.TimeoutExpired):
            pass  # it is ended anyway
