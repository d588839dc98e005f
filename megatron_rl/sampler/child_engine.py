"""The embedded engine's process as its parent sees it: started, asked by any of its threads, ended.

A child, because vLLM and Megatron each want the process's threads, distributed state and signal handlers for
themselves. It is started in its own session, so that Ctrl-C in a terminal reaches the parent alone. The kernel ties
it to the thread that has started it: a thread of its own does, which also reads what it says.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_rl.config.fleet import devices
from megatron_rl.processes.channel import Channel, ChannelClosed, channel_pair
from megatron_rl.processes.process import describe_end, for_the_driver_alone
from megatron_rl.processes.pulse import own, waiting
from megatron_rl.processes.scratch import remove_with_it
from megatron_rl.sampler.engine_process import (
    SHARED_MEMORY,
    end_group,
    engine_environment,
    log_tail,
    lost_worker,
    remove_segments,
    segments_of_session,
)
from megatron_rl.sampler.engine_settings import EngineSettings, engine_arguments, write_engine_folder
from megatron_rl.sampler.protocol import NOT_RUNNING, SamplerError
from megatron_rl.weight_sync.manifest import WeightSyncError

ENGINE = "engine"  # in what is said of it
CLOSE_GRACE_S = 3.0
WORKERS_GRACE_S = 4.0
Replies = queue.SimpleQueue[dict[str, Any] | None]  # None: no more will come


class RequestChannel:
    """Requests to another process from several threads; every reply goes to whoever asked."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected: dict[int, Replies] = {}  # by request
        self._numbering, self._sending = threading.Lock(), threading.Lock()
        self._number = 0
        self._over = False

    def send(self, method: str, arguments: dict[str, Any], replies: Replies) -> int:
        """The request's number, which its replies carry. Raises ChannelClosed where none can come any more."""
        with self._numbering:
            if self._over:
                raise ChannelClosed("the end of the stream was seen before")
            self._number += 1
            number = self._number
            self._expected[number] = replies
        with self._sending:
            self._channel.send({"id": number, "method": method, "arguments": arguments})
        return number

    def deliver(self) -> None:
        """Read replies until the end of the stream: in a thread of its own, so that the other side never waits."""
        try:
            while True:
                self._hand_over(self._channel.receive())
        except OSError:  # a ChannelClosed, or what a channel says that was closed meanwhile
            pass
        with self._numbering:
            self._over = True
            left = {id(replies): replies for replies in self._expected.values()}
        for replies in left.values():
            replies.put(None)

    def _hand_over(self, reply: dict[str, Any]) -> None:
        with self._numbering:
            replies = self._expected.get(reply["id"])
            value = reply.get("value")
            if not (isinstance(value, dict) and value.get("left", 0) > 0):  # the last one to this request
                self._expected.pop(reply["id"], None)
        if replies is not None:
            replies.put(reply)

    def forget(self, numbers: list[int]) -> None:
        """Expect no replies to these requests any more."""
        with self._numbering:
            for number in numbers:
                self._expected.pop(number, None)

    def close(self) -> None:
        self._channel.hang_up()


class EngineDied(SamplerError):
    """Its process has ended by itself, or one of its workers has."""


class ChildEngine:
    """One process from its start to its end: what ends it, for whichever thread, ends it for all."""

    def __init__(
        self, settings: EngineSettings, hf_folder: Path, log_path: Path, worker_extension: str, cores: str
    ) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._settings, self._section = settings, settings.sampler
        self._hf_folder = hf_folder
        self._log_path = log_path
        self._worker_extension, self._cores = worker_extension, cores
        self._requests: RequestChannel | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._starting = threading.Lock()
        self._started: Replies | None = None  # launched, and nobody has waited for it yet
        self._segments: set[str] = set()  # shared memory of the engine's processes
        self._ending = threading.RLock()
        self._failed: SamplerError | None = None
        self._ended = threading.Event()

    def launch(self) -> None:
        """Start the child without waiting for its engine."""
        with self._ending:
            if self._failed is not None:
                raise SamplerError(NOT_RUNNING)
            self._folder = tempfile.TemporaryDirectory(prefix="megatron-rl-engine-")
            folder = write_engine_folder(self._hf_folder, Path(self._folder.name), self._settings.quantization)
            arguments = engine_arguments(self._settings, folder, self._worker_extension)
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            launched: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
            threading.Thread(target=self._tend, args=[launched], name=ENGINE, daemon=True).start()
            if error := launched.get():
                raise error
        replies: Replies = queue.SimpleQueue()
        self._send("start", arguments, replies)
        self._started = replies

    def _tend(self, launched: queue.SimpleQueue[BaseException | None]) -> None:
        """Start the child and read its replies: a thread's whole work, which outlives the child."""
        try:
            self._requests = self._start_process()
        except BaseException as error:  # of every kind: the launching thread raises it
            launched.put(error)
            return
        launched.put(None)
        self._requests.deliver()
        self._ended.wait()

    def _start_process(self) -> RequestChannel:
        channel, theirs = channel_pair()
        cores, tensor_parallel = self._cores, self._section.tensor_parallel
        with theirs, self._log_path.open("ab") as log, for_the_driver_alone():
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.engine.child", str(theirs.fileno()), str(os.getpid()), cores],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                env=engine_environment(tensor_parallel, next(iter(devices(self._section)), None), cores),
                start_new_session=True,
            )
        own(ENGINE, self.process)
        return RequestChannel(channel)

    def wait_ready(self) -> None:
        with self._starting:
            replies, self._started = self._started, None
            if replies is not None:
                self._wait(replies, "start", self._section.start_timeout_s, "sampler.start_timeout_s")
                self._note_segments()

    def call(self, method: str, **arguments: Any) -> Any:
        """The answer to one of `engine.child`'s requests."""
        replies: Replies = queue.SimpleQueue()
        self.ask(method, replies, **arguments)
        return self.next_reply(method, replies)["value"]

    def ask(self, method: str, replies: Replies, **arguments: Any) -> int:
        """Send a request without waiting for its answer; returns the number that the answer will carry."""
        self.wait_ready()
        return self._send(method, arguments, replies)

    def next_reply(self, method: str, replies: Replies) -> dict[str, Any]:
        return self._wait(replies, method, self._section.request_timeout_s, "sampler.request_timeout_s")

    def forget(self, numbers: list[int]) -> None:
        """Expect no replies to these requests any more."""
        if self._requests is not None:
            self._requests.forget(numbers)

    def close(self) -> None:
        """Stop the child and its workers; safe to call twice and in any state."""
        with self._ending:
            self._failed = self._failed or SamplerError(NOT_RUNNING)
            self._note_segments()
            if self._requests is not None:
                self._ask_workers_to_end()
                self._requests.close()  # the child kills its group at the end of the stream
                self._requests = None
            if self.process is not None:
                end_group(self.process, CLOSE_GRACE_S)
                self.process = None
                remove_segments(self._segments)
                self._segments = set()
            if self._folder is not None:
                self._folder.cleanup()
                self._folder = None
            self._ended.set()

    def _send(self, method: str, arguments: dict[str, Any], replies: Replies) -> int:
        requests = self._requests
        if requests is None:
            raise EngineDied(str(self._failed)) if isinstance(self._failed, EngineDied) else SamplerError(NOT_RUNNING)
        try:
            return requests.send(method, arguments, replies)
        except ChannelClosed:
            raise self._death(f"the sampler's process ended before `{method}`") from None

    def _wait(self, replies: Replies, method: str, timeout_s: float, key: str) -> dict[str, Any]:
        """Wait for a reply; every way in which none comes ends the child and names its log."""
        try:
            with waiting(ENGINE, timeout_s, key):
                reply = replies.get(timeout=timeout_s)
        except queue.Empty:
            raise self._failure(f"the sampler did not answer `{method}` within {key}={timeout_s:g}") from None
        except BaseException:
            self.close()  # an interrupt: who waited for an answer does not come back for it
            raise
        if reply is None:
            raise self._death(f"the sampler's process ended during `{method}`")
        if "error" in reply:
            raise self._error(method, reply["error"])
        return reply

    def _error(self, method: str, error: dict[str, str]) -> Exception:
        if error["type"] == WeightSyncError.__name__:
            return WeightSyncError(error["message"])
        lost = lost_worker(self._log_path)
        message = f"`{method}` failed in the sampler: {lost or error['type'] + ': ' + error['message']}"
        if lost or method == "start":
            return self._failure(message, EngineDied if lost else SamplerError)
        return SamplerError(f"{message} (log: {self._log_path})")

    def _failure(self, message: str, kind: type[SamplerError] = SamplerError) -> SamplerError:
        """Close, and put the end of the child's log under the message. The first failure is everybody's."""
        with self._ending:
            if self._failed is not None:
                return type(self._failed)(str(self._failed))
            process = self.process
            by_itself = process is not None and process.poll() is not None
            self.close()
            if process is not None and process.returncode is not None:
                message += f" (exit status {process.returncode})"
                message += f": {describe_end(process.returncode)}" if by_itself and process.returncode < 0 else ""
            tail = log_tail(self._log_path)
            message = f"{message}. The end of {self._log_path}:\n{tail}" if tail else f"{message}; see {self._log_path}"
            self._failed = kind(message)
            return self._failed

    def _death(self, message: str) -> SamplerError:
        """A process closes its sockets a moment before it has ended."""
        with self._ending:
            with suppress(subprocess.TimeoutExpired):
                if self.process is not None:
                    self.process.wait(CLOSE_GRACE_S)
            return self._failure(message, EngineDied)

    def _note_segments(self) -> None:
        """Only workers share memory; which of it is theirs can be seen while they live."""
        if self.process is not None and self._section.tensor_parallel > 1:
            found = segments_of_session(self.process.pid) - self._segments
            self._segments |= found
            remove_with_it(SHARED_MEMORY / name for name in found)

    def _ask_workers_to_end(self) -> None:
        """Workers of a larger engine share memory that only they release; a single process needs no such wait."""
        if self._section.tensor_parallel == 1 or self.process is None or self._requests is None:
            return
        try:
            self._requests.send("shutdown", {}, queue.SimpleQueue())
            self.process.wait(WORKERS_GRACE_S)
        except (ChannelClosed, subprocess.TimeoutExpired):
            pass  # it is ended anyway
