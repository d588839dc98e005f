"""Log of a run at MLflow: the server of MLFLOW_TRACKING_URI, or files in the run's directory."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.checkpoint.resume import flatten
from megatron_rl.config.plain_yaml import redact
from megatron_rl.files import read_bounded, write_atomic
from megatron_rl.tracking.tracker import PROJECT, Tracker
from megatron_rl.types import Metrics

DEFAULTS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",  # which needs no database
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # a server that does not respond delays a step by 20 s
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
STATES = {"finished": "FINISHED", "failed": "FAILED"}
NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")
LONGEST_PARAM = 500


class MlflowLog(Tracker):
    def __init__(self, config: Mapping[str, Any], run_dir: Path, resumes_after: int) -> None:
        for name, value in DEFAULTS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        folder = (run_dir / "mlflow").resolve().as_uri()
        self.where = os.environ.get("MLFLOW_TRACKING_URI", folder)
        self._client = MlflowClient(self.where)
        path = run_dir / "mlflow.id"
        if path.is_file():
            self._id = read_bounded(path).decode().strip()
            last = self._client.get_run(self._id).data.metrics.get("progress/step", -1.0)
            self.held = min(int(last), resumes_after)
            self._client.update_run(self._id, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, run_name=run_dir.name).info.run_id
        write_atomic(path, f"{self._id}\n")
        settings = [
            Param(_name(key), str(value)[:LONGEST_PARAM]) for key, value in flatten(redact(config))
        ]
        for first in range(0, len(settings), 100):  # at most in a request
            self._client.log_batch(self._id, params=settings[first : first + 100])

    def log(self, step: int, row: Metrics) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_name(name), value, now, step) for name, value in row.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def finish(self, state: str, numbers: Metrics) -> None:
        self._client.set_terminated(self._id, STATES.get(state, "KILLED"))


def _name(name: str) -> str:
    """A name that MLflow accepts: eval/pass@4 becomes eval/pass_at_4."""
    return NOT_IN_NAMES.sub("_", name.replace("@", "_at_"))
