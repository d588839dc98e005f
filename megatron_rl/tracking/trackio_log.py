"""Log of a run at Trackio: a database in the run's directory, or the server of TRACKIO_SERVER_URL."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_rl.config.plain_yaml import redact
from megatron_rl.tracking.tracker import PROJECT, Tracker
from megatron_rl.types import Metrics


class TrackioLog(Tracker):
    def __init__(self, config: Mapping[str, Any], run_dir: Path, resumes_after: int) -> None:
        folder = run_dir / "trackio"
        if folder.is_dir():
            self.held = resumes_after
        folder.mkdir(exist_ok=True)
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        import trackio

        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run_dir.name,
            config=redact(config),
            resume="allow",
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = os.environ.get("TRACKIO_SERVER_URL", f"TRACKIO_DIR={folder} trackio show")

    def log(self, step: int, row: Metrics) -> None:
        self._run.log(dict(row), step=step)

    def finish(self, state: str, numbers: Metrics) -> None:
        self._run.finish()
