"""The embedded engine's process, started again when it dies, with the weights that it had.

Between two syncs the files of the last version lie where the engine has read them (weight_sync/file_push.py), so that
a new engine is told what the old one was told, by this rank alone. Then the call in which the old one died is made
again: seeds belong to requests, and on hosts the answers are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.config.schema import Transport
from megatron_rl.sampler.child_engine import ChildEngine, EngineDied
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.protocol import MAX_RESTARTS, SamplerError
from megatron_rl.weight_sync.manifest import WeightSyncError

BEGIN, STAGE, FINISH = "start_weight_update", "update_weights", "finish_weight_update"
Call = tuple[str, dict[str, Any]]


class LastingEngine(ChildEngine):
    """A first start that fails is not tried again; nor is a call that takes too long."""

    def __init__(
        self,
        settings: EngineSettings,
        hf_folder: Path,
        log_path: Path,
        worker_extension: str,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(settings, hf_folder, log_path, worker_extension)
        self.restarts = 0
        self._first_log, self._note = log_path, note
        self._by_files = settings.transport == Transport.file
        self._init: list[Call] = []
        self._served: list[Call] = []  # the update that brought the present weights
        self._update: list[Call] = []  # one that is not finished

    def call(self, method: str, **arguments: Any) -> Any:
        self.wait_ready()
        if method == BEGIN:  # the new version's files have taken the place of the old one's
            self._served, self._update = [], []
        try:
            answer = self._lasting_call(method, arguments)
        except WeightSyncError:
            self._update = []
            raise
        self._remember(method, arguments)
        return answer

    def _lasting_call(self, method: str, arguments: dict[str, Any]) -> Any:
        while True:
            try:
                return super().call(method, **arguments)
            except EngineDied as error:
                self._revive(error)

    def _remember(self, method: str, arguments: dict[str, Any]) -> None:
        """What a new engine would have to be told."""
        said = (method, arguments)
        if method == "init_weight_transfer_engine":
            self._init = [said]
        elif method in (BEGIN, STAGE):
            self._update.append(said)
        elif method == FINISH:
            self._served, self._update = [*self._update, said], []

    def _revive(self, error: EngineDied) -> None:
        """Until a new engine is where the old one was."""
        while True:
            if not self._by_files:
                raise SamplerError(
                    f"an embedded engine that dies is started again with sync.transport=file alone: {error}"
                ) from error
            if self.restarts >= MAX_RESTARTS:
                raise SamplerError(f"given up after {MAX_RESTARTS} restarts: {error}") from error
            self.restarts += 1
            what = str(error).partition(". The end of ")[0]
            self._note(f"{what}; it starts again ({self.restarts} of {MAX_RESTARTS} restarts)")
            begun = time.monotonic()
            try:
                self._log_path = self._first_log.with_stem(f"{self._first_log.stem}_{self.restarts}")
                self.launch()
                for method, arguments in (*self._init, *self._served, *self._update):
                    super().call(method, **arguments)
            except EngineDied as again:
                error = again
            except WeightSyncError as refused:
                raise SamplerError(f"the engine that was started again refused its weights: {refused}") from refused
            else:
                self._note(f"the sampler's process is back, with its weights, after {time.monotonic() - begun:.0f} s")
                return
