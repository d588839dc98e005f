"""Log of a run for TensorBoard: event files in the run's directory.

Written by TensorBoard's own package, which needs no torch. Values are doubles: a float32 would
round large counts.
"""

import time
from pathlib import Path
from typing import Any

from megatron_rl.tracking.tracker import Tracker
from megatron_rl.types import Metrics


class TensorBoardLog(Tracker):
    def __init__(self, run_dir: Path, resumes_after: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary
        self._tensor = tensor_pb2.TensorProto
        folder = run_dir / "tensorboard"
        if folder.is_dir():
            self.held = resumes_after
        self.where = f"tensorboard --logdir {folder}"
        self._writer = EventFileWriter(str(folder))
        # TensorBoard drops the later steps of earlier attempts, which this one repeats
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(self.held + 1, session_log=start)

    def log(self, step: int, row: Metrics) -> None:
        values = [
            self._summary.Value(
                tag=name,
                metadata={"plugin_data": {"plugin_name": "scalars"}},
                tensor=self._tensor(dtype="DT_DOUBLE", double_val=[value]),
            )
            for name, value in row.items()
        ]
        self._add(step, summary=self._summary(value=values))

    def finish(self, state: str, numbers: Metrics) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()  # a killed run keeps its rows
