"""Interface of a tracker, a program that shows the metrics of runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.tracking.alarms import AlarmEvent
from megatron_rl.types import Metrics, Scored

PROJECT = "megatron-rl"


class Tracker:
    """One run at a tracker, from its constructor to `finish`. A resumed run is the same run there.

    A method that raises ends the tracker, not the run.
    """

    held = -1  # the last step that it has of earlier attempts
    where = ""  # address or folder, for the console
    trouble = ""  # warning of the start

    def log(self, step: int, row: Metrics) -> None:
        """Log a line of metrics.jsonl."""
        raise NotImplementedError

    def samples(self, step: int, shown: Sequence[Scored]) -> None:
        """Log recorded responses, if the tracker shows text."""

    def alarms(self, news: Sequence[AlarmEvent], active: Mapping[str, Any]) -> None:
        """Log alarms that were raised or cleared, and those that are active."""

    def finish(self, state: str, numbers: Metrics) -> None:
        """Close the run with its final state and summary."""
        raise NotImplementedError
