"""The embedded engine's process, started again when it dies, with the weights that it had.

Between two syncs the files of the last version lie where the engine has read them (weight_sync/file_push.py), so that
a new engine is told what the old one was told, by this rank alone. Then the call in which the old one died is made
again: seeds belong to requests, and on hosts the answers are the same.

Several threads may notice that it has died: the first one starts it again, the others wait and find the new one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import Any

from megatron_rl.config.schema import Transport
from megatron_rl.processes.pulse import waiting
from megatron_rl.sampler.child_engine import ENGINE, ChildEngine, EngineDied
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.protocol import MAX_RESTARTS, NOT_RUNNING, SamplerError
from megatron_rl.weight_sync.manifest import WeightSyncError

INIT, BEGIN, STAGE, FINISH = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update",
)  # fmt: skip
REMEMBERED = (INIT, BEGIN, STAGE, FINISH)
Call = tuple[str, dict[str, Any]]


class RestartingEngine:
    """A first start that fails is not tried again; nor is a call that takes too long."""

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_path: Path,
        worker_extension: str,
        cores: str,
        note: Callable[[str], None],
    ) -> None:
        self.restarts = 0
        self._settings = settings
        self._first_log, self._note = log_path, note
        self._make = partial(ChildEngine, settings, hf_folder, worker_extension=worker_extension, cores=cores)
        self._child = self._coming = self._make(log_path)
        # held while the engine is started again, and while what a new one has to be told is in the making
        self._telling = threading.RLock()
        self._closed = False
        self._init: list[Call] = []
        self._served: list[Call] = []  # the update that brought the present weights
        self._update: list[Call] = []  # one that is not finished

    @property
    def process(self) -> Popen[bytes] | None:
        return self._child.process

    @property
    def child(self) -> ChildEngine:
        """The present one, once it has started."""
        self._child.wait_ready()
        return self._child

    def launch(self) -> None:
        """Start the child without waiting for its engine."""
        self.close()
        self._closed = False
        self._child = self._coming = self._make(self._first_log)
        self._child.launch()

    def wait_ready(self) -> None:
        self._child.wait_ready()

    def call(self, method: str, **arguments: Any) -> Any:
        with self.in_turn() if method in REMEMBERED else nullcontext():
            if method == BEGIN:  # the new version's files have taken the place of the old one's
                self._served, self._update = [], []
            while True:
                child = self.child
                try:
                    answer = child.call(method, **arguments)
                except EngineDied as error:
                    self.revive(child, error)
                except WeightSyncError:
                    self._update = []
                    raise
                else:
                    self._remember(method, arguments)
                    return answer

    def close(self) -> None:
        """End the engine, in the middle of a new start too; safe to call twice and in any state."""
        self._closed = True
        self._child.close()
        self._coming.close()

    def revive(self, dead: ChildEngine, error: EngineDied) -> None:
        """Wait until a new engine is where the old one was; whoever comes first starts it."""
        with self.in_turn():
            while self._child is dead:
                try:
                    self._start_again(error)
                except EngineDied as again:
                    error = again

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Keep others from starting the engine again while files that a new one would read are written over."""
        with waiting(ENGINE, self._settings.sampler.start_timeout_s, "sampler.start_timeout_s"):
            self._telling.acquire()
        try:
            yield
        finally:
            self._telling.release()

    def _start_again(self, error: EngineDied) -> None:
        if self._settings.transport != Transport.file:
            raise SamplerError(
                f"an embedded engine that dies is started again with sync.transport=file alone: {error}"
            ) from error
        if self.restarts >= MAX_RESTARTS:
            raise SamplerError(f"given up after {MAX_RESTARTS} restarts: {error}") from error
        self.restarts += 1
        what = str(error).partition(". The end of ")[0]
        self._note(f"{what}; it starts again ({self.restarts} of {MAX_RESTARTS} restarts)")
        begun = time.monotonic()
        coming = self._coming = self._make(self._first_log.with_stem(f"{self._first_log.stem}_{self.restarts}"))
        if self._closed:
            raise SamplerError(NOT_RUNNING)
        coming.launch()
        try:
            coming.wait_ready()
            for method, arguments in (*self._init, *self._served, *self._update):
                coming.call(method, **arguments)
        except WeightSyncError as refused:
            coming.close()
            raise SamplerError(f"the engine that was started again refused its weights: {refused}") from refused
        self._child = coming
        self._note(f"the sampler's process is back, with its weights, after {time.monotonic() - begun:.0f} s")

    def _remember(self, method: str, arguments: dict[str, Any]) -> None:
        """Keep what a new engine would have to be told."""
        said = (method, arguments)
        if method == INIT:
            self._init = [said]
        elif method in (BEGIN, STAGE):
            self._update.append(said)
        elif method == FINISH:
            self._served, self._update = [*self._update, said], []
