"""The trackers of a run (`log.trackers`), all fed from the rows of metrics.jsonl.

A library is imported only where it is used; preflight finds those that are not installed.
"""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.choices import TrackerName, Wandb
from megatron_rl.config.schema import LogSection
from megatron_rl.logs import logger
from megatron_rl.tracking.metrics_file import numbers_of_file, read_metrics
from megatron_rl.tracking.mlflow_log import MlflowLog
from megatron_rl.tracking.tensorboard_log import TensorBoardLog
from megatron_rl.tracking.tracker import Tracker
from megatron_rl.tracking.trackio_log import TrackioLog
from megatron_rl.tracking.wandb_log import WandbLog, resolve_mode
from megatron_rl.types import Metrics

PACKAGES = {
    TrackerName.tensorboard: "tensorboard",
    TrackerName.mlflow: "mlflow-skinny",
    TrackerName.trackio: "trackio",
}
PASSWORD = re.compile(r"(?<=://)[^/@\s]+@")  # in an address


class Trackers:
    """All trackers of an attempt. One that fails is dropped: the run continues without it."""

    def __init__(
        self,
        log: LogSection,
        resolved: Mapping[str, Any],
        run_dir: Path,
        resumes_after: int | None = None,
    ) -> None:
        after = -1 if resumes_after is None else resumes_after
        mode = resolve_mode(log.wandb_mode)
        begin: dict[TrackerName, Callable[[], Tracker]] = {
            TrackerName.wandb: lambda: WandbLog(resolved, run_dir, mode, after, log.wandb_run),
            TrackerName.tensorboard: lambda: TensorBoardLog(run_dir, after),
            TrackerName.mlflow: lambda: MlflowLog(resolved, run_dir, after),
            TrackerName.trackio: lambda: TrackioLog(resolved, run_dir, after),
        }
        self._metrics = run_dir / "metrics.jsonl"
        self._live: dict[str, Tracker] = {}
        for name, make in begin.items():
            if name in log.trackers or (name is TrackerName.wandb and mode is not Wandb.none):
                self._begin(name, make)
        if self._live and self._metrics.is_file():
            for row in read_metrics(self._metrics):
                if row["progress/step"] <= after:  # later steps are repeated
                    self.log(int(row["progress/step"]), row)

    def log(self, step: int, row: Metrics) -> None:
        self.send(lambda one: one.log(step, row), step)

    def finish(self, state: str) -> None:
        if not self._live:
            return
        numbers = numbers_of_file(self._metrics)
        self.send(lambda one: one.finish(state, numbers))

    def send(self, call: Callable[[Tracker], None], step: float = math.inf) -> None:
        """Call every tracker that does not have this step yet."""
        for name, tracker in list(self._live.items()):
            if step <= tracker.held:
                continue
            try:
                call(tracker)
            except Exception as error:  # of any type: a pipe, a disk, a server
                del self._live[name]
                _warn(name, error)

    def _begin(self, name: str, make: Callable[[], Tracker]) -> None:
        try:
            tracker = make()
        except Exception as error:  # of a server, or of a library
            _warn(name, error)
            return
        self._live[name] = tracker
        logger(name).info(PASSWORD.sub("", tracker.where))
        if tracker.trouble:
            logger(name).warning(tracker.trouble)


def _warn(name: str, error: Exception) -> None:
    text = PASSWORD.sub("", f"{type(error).__name__}: {error}")
    logger(name).warning(
        f"the tracker failed ({text}). The run continues without it; metrics.jsonl has every step."
    )
