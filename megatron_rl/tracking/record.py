"""Recorder of a run on the driver: metrics, ledger, rollouts, console, trackers, and status.json
up to the final state.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from megatron_rl.checkpoint import checkpoints
from megatron_rl.config.choices import Wandb
from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.config.schema import IfExists, LogSection
from megatron_rl.logs import Formatter, logger, replace_handlers
from megatron_rl.processes import heartbeat
from megatron_rl.tracking.alarms import Alarms
from megatron_rl.tracking.causes import Cause, of_error
from megatron_rl.tracking.console import Display, choose_display, duration, sample_line, step_line
from megatron_rl.tracking.disk import Disk, LineFile
from megatron_rl.tracking.metrics import UnknownMetricWarning, unknown
from megatron_rl.tracking.metrics_file import as_numbers, encode_line, read_metrics
from megatron_rl.tracking.run_dir import LAUNCHER, RunDir, claimed_for_this_process, open_run
from megatron_rl.tracking.status import beat, mark_status
from megatron_rl.tracking.timeline import PhaseClock, Span, encode_spans, throughput
from megatron_rl.tracking.trackers import Trackers
from megatron_rl.tracking.wandb_log import resolve_mode
from megatron_rl.types import Metrics, Scored

if TYPE_CHECKING:
    from megatron_rl.tracking.rollout_file import Columns

ETA_STEPS = 20  # steps behind the estimate of the remaining time
SAMPLE_S = 60.0  # seconds between responses shown on the console
BEAT_S = 15.0  # seconds between heartbeats in status.json


class Recorder:
    """Writer of the run directory from the first line of metrics to the final status. An exception
    is `failed`, Ctrl-C or SystemExit is `stopped`.
    """

    def __init__(
        self,
        config: LogSection,
        resolved_yaml: str,
        run_dir: Path,
        n_steps: int,
        display: Display | None = None,
        if_exists: IfExists = IfExists.refuse,
        alarms: Alarms | None = None,
        rates: Callable[[Metrics], Metrics] = lambda line: {},
    ) -> None:
        resolve_mode(config.wandb_mode)  # raises before anything is written
        moved = ""
        self.run = RunDir(run_dir)
        if not claimed_for_this_process(run_dir):  # else by a launcher
            self.run, moved = open_run(run_dir, if_exists, resolved_yaml)
        self.alarms = alarms or Alarms()
        self._rates = rates
        mark_status(run_dir, "running", alarms={})
        self._beat_at = time.monotonic()
        self._sample_at = -math.inf
        self._broken_off: str | None = None  # phase in which an exception was raised
        self._end = ("finished", "")
        self._closed = False
        self.clock = PhaseClock()
        self._begun = time.perf_counter()
        self._n_steps = n_steps
        self._last_step = self.run.resumes_after
        if self._last_step is not None and self.run.metrics.is_file():
            self.alarms.restore(read_metrics(self.run.metrics), self._last_step)
        self._step_times: list[float] = []
        self._unknown: set[str] = set()
        self._display = display or choose_display(run_dir.name, n_steps, logs=self.run.logs)
        self._log_handler = _LogHandler(self._display, self.run.logs / "driver.log")
        self._other_handlers = replace_handlers([self._log_handler])
        self._log = logger("run")
        self._disk = Disk(self.run)
        if moved:
            self._log.info(moved)
        self._note_places()
        resolved = {}
        if config.trackers or config.wandb is not Wandb.none:
            resolved = read_yaml(resolved_yaml)
        self._trackers = Trackers(config, resolved, run_dir, self._last_step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.clock.enter(name)
        self._display.phase(name)
        self._beat()
        self._broken_off = None
        try:
            with heartbeat.phase(name):
                yield
        except BaseException:
            self._broken_off = self._broken_off or name
            raise
        finally:
            self._display.phase(self.clock.leave())

    def log(self, step: int, metrics: Metrics) -> Metrics:
        """Log a line of metrics: the caller's, the time since the last line by phase, progress."""
        line = as_numbers(metrics)
        line |= self.clock.finish_step()
        line |= {"progress/step": step, "progress/elapsed_s": time.perf_counter() - self._begun}
        line = throughput(line) | self._rates(line) | line
        for name in set(unknown(line)) - self._unknown:
            self._unknown.add(name)
            warnings.warn(
                f"metric {name!r} is not in tracking/metrics.yaml",
                UnknownMetricWarning,
                stacklevel=2,
            )
        self._disk.write_line(self.run.metrics, encode_line(line))
        self._disk.write_line(self.run.timeline, encode_spans(step, self.clock.spans))
        self.clock.spans.clear()
        self._trackers.log(step, line)
        eta_s = self._estimate_left(step, line["time/step"])
        self._last_step = step
        self._display.step(step, line, eta_s)
        progress = step_line(step, self._n_steps, line, eta_s)
        logger("train").info(progress, extra={"is_step": True})
        if news := self.alarms.after(line):
            self._beat_at = -math.inf  # forces an immediate heartbeat
            for one in news:
                logger("alarm").warning(one)
            self._trackers.send(lambda one: one.alarms(news, self.alarms.active))
        self._beat()
        return line

    def skip(self) -> None:
        """Drop the time since the last line, which belongs to no step: engines were restarted."""
        self.clock.finish_step()

    def ledger(self, step: int, drawn: tuple[int, int], trained: Sequence[int]) -> None:
        """Record prompts by their number in the run's order: the range drawn, and those trained."""
        self._disk.write_line(
            self.run.ledger, json.dumps({"step": step, "drawn": drawn, "trained": list(trained)})
        )

    def spans(self, spans: Sequence[Span]) -> None:
        """Add work of other threads for this step, at any time."""
        self.clock.spans += spans

    def rollouts(self, step: int, scored: Sequence[Scored], **columns: Unpack[Columns]) -> None:
        """rollouts/step_N.parquet: the input of replay, and of the report's histograms."""
        self._disk.write_rollouts(self.run.rollouts / f"step_{step}.parquet", scored, **columns)
        shown = [scored[place] for place in columns.get("pieces", {})]
        if shown and time.monotonic() - self._sample_at > SAMPLE_S:
            self._sample_at = time.monotonic()
            logger("sample").info(sample_line(shown[0]))
        if shown:
            self._trackers.send(lambda one: one.samples(step, shown), step)

    def end_early(self, reason: str, *, asked: bool) -> None:
        """Note that the loop ends after this step: a stop was `asked`, or run.stop is reached."""
        step = self._last_step
        steps = self._n_steps
        state, how = ("stopped", "stopped") if asked and step != steps else ("finished", "ended")
        self._end = state, f"{how} after step {step} of {steps}: {reason}"
        self._log.info(self._end[1])

    def close(self, state: str = "finished", reason: str = "", cause: Cause | None = None) -> None:
        """Record how the run ended, status.json first, in case a later write fails."""
        if self._closed:
            return
        self._closed = True
        self._disk.close()
        more = self._about()
        if cause:
            more |= {"phase": cause.phase, "cause": cause.as_fields()}
        try:
            mark_status(self.run.path, state, reason, unknown_metrics=sorted(self._unknown), **more)
        except OSError as error:
            self._log.error(f"{self.run.status} could not be written: {error.strerror}")
        self._display.close()
        last = f"{state} after {duration(time.perf_counter() - self._begun)}"
        if reason:
            last += f": {reason}"
        if active := self.alarms.summaries():
            last += f"; active alarms: {', '.join(active)}"
        self._log.info(last)
        if cause:
            # a launcher prints it itself
            extra = {"file_only": LAUNCHER in os.environ}
            self._log.error(cause.paragraph(), extra=extra)
        self._log.info(describe_contents(self.run))
        self._trackers.finish(state)
        replace_handlers(self._other_handlers)
        self._log_handler.close()
        if self.run.lock:
            self.run.lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if kind is None:
            self.close(*self._end)
        elif issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.close("stopped", str(error) or "interrupted")
        else:
            assert error is not None
            phase = self._broken_off or ""
            if not phase and self._last_step is None:
                phase = "the start"
            log = self.run.logs / "rank_0.log"
            cause = of_error(error, "rank 0", phase, str(log) if log.exists() else "")
            self.close("failed", f"{kind.__name__}: {error}", cause)

    def _note_places(self) -> None:
        path = shlex.quote(str(self.run.path))
        self._log.info(f"directory {path}")
        self._log.info(f"metrics: tail -f {path}/metrics.jsonl")
        self._log.info(f"logs: tail -F {path}/logs/attempt_{self.run.attempt}/*")

    def _estimate_left(self, step: int, seconds: float) -> float | None:
        if step > 0:  # step 0 holds the start of the engines
            self._step_times.append(seconds)
        recent = self._step_times[-ETA_STEPS:]
        if recent and step < self._n_steps:
            return math.fsum(recent) / len(recent) * (self._n_steps - step)
        return None

    def _beat(self) -> None:
        if time.monotonic() - self._beat_at > BEAT_S and not self._closed:
            self._beat_at = time.monotonic()
            with suppress(OSError):  # the metrics show the problem
                beat(self.run.path, **self._about())

    def _about(self) -> dict[str, Any]:
        """The part of status.json that every state has."""
        known = {"step": self._last_step, "steps": self._n_steps, "alarms": self.alarms.active}
        return known | self._disk.news


class _LogHandler(logging.Handler):
    """Handler that writes log lines to the console, above a table if there is one, and to a file.

    A table shows the steps itself.
    """

    def __init__(self, display: Display, path: Path) -> None:
        super().__init__()
        self.setFormatter(Formatter())
        self.path = path
        self._display = display
        self._text = LineFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        in_table = self._display.shows_steps and getattr(record, "is_step", False)
        if not in_table and not getattr(record, "file_only", False):
            self._display.note(line)
        with suppress(OSError):  # the same line is on the console
            self._text.write(line)

    def close(self) -> None:
        with suppress(OSError):
            self._text.close()
        super().close()


def describe_contents(run: RunDir) -> str:
    if not run.metrics.exists():
        return f"{run.path} is gone"
    n_rollouts = len(list(run.rollouts.glob("step_*.parquet")))
    n_checkpoints = len(checkpoints.steps(run.checkpoints))
    rows = (
        (True, "metrics.jsonl", f"{run.n_lines()} lines"),
        (n_rollouts, "rollouts/", f"{n_rollouts} recorded steps"),
        (n_checkpoints, "checkpoints/", f"{n_checkpoints} checkpoints"),
        (run.model.is_dir(), "model/", "the last policy, as a Hugging Face folder"),
        (run.best_model.is_dir(), "model-best/", "the best one by checkpoint.best"),
        (True, f"logs/attempt_{run.attempt}/", ""),
    )
    lines = [f"in {run.path}/:"]
    lines += [f"  {name:<18}{about}".rstrip() for there, name, about in rows if there]
    return "\n".join(lines)
