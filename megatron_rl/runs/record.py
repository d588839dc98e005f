"""What a run leaves behind, and says while it goes on: the driver's Recorder, and a silent one for the other ranks.

Shape suffixes: B sequences, T response positions (right-padded); row i belongs to `scored[i]`.
"""

from __future__ import annotations

import math
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from megatron_rl.config.plain_yaml import read_yaml
from megatron_rl.config.schema import IfExists, LogSection, Wandb
from megatron_rl.runs.console import Display, choose_display, duration, step_line
from megatron_rl.runs.metrics import UnknownMetricWarning, unknown
from megatron_rl.runs.metrics_file import append_to, encode_line
from megatron_rl.runs.run_dir import ENDED, RunDir, mark_status, open_run, read_status
from megatron_rl.runs.wandb_log import WandbLog, resolve_mode
from megatron_rl.types import Scored

if TYPE_CHECKING:
    from megatron_rl.runs.rollout_file import Columns

ETA_STEPS = 20  # the steps that the estimate of the time left looks back at


class SilentRecorder:
    """What the loop asks of a recorder, for ranks that have nothing to write."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        return dict(metrics)

    def note(self, text: str) -> None:
        pass


class PhaseClock:
    """Splits a step's wall clock. A phase inside another one is not counted twice."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._begun = self._since = time.perf_counter()

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)

    def leave(self) -> str | None:
        """The phase that goes on, if there is one around."""
        self._charge()
        self._open.pop()
        return self._open[-1] if self._open else None

    def finish_step(self) -> dict[str, float]:
        self._charge()
        whole = self._since - self._begun
        claimed = math.fsum(self._seconds.values())
        split = {f"time/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds, self._begun = {}, self._since
        return {**split, "time/step": whole, "time/other": max(0.0, whole - claimed)}

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            name = self._open[-1]
            self._seconds[name] = self._seconds.get(name, 0.0) + now - self._since
        self._since = now


class Recorder:
    """Owns the run directory from the first line of metrics to the last word in status.json.

    A directory that a launcher has claimed with `open_run` is taken over; otherwise it is claimed here.
    As a context manager it closes itself: an exception is `failed`, Ctrl-C or SystemExit is `stopped`.
    """

    def __init__(
        self,
        config: LogSection,
        resolved_yaml: str,
        run_dir: Path,
        n_steps: int,
        display: Display | None = None,
        if_exists: IfExists = IfExists.refuse,
    ) -> None:
        mode = resolve_mode(config.wandb)
        moved = ""
        if read_status(run_dir).get("state") == "starting":
            self.run = RunDir(run_dir)
        else:
            self.run, moved = open_run(run_dir, if_exists, resolved_yaml)
        mark_status(run_dir, "running")
        self._n_steps = n_steps
        self._clock = PhaseClock()
        self._begun = time.perf_counter()
        self._step_times: list[float] = []
        self._last_step: int | None = None
        self._unknown: set[str] = set()
        self._closed = False
        self._metrics = append_to(self.run.metrics)
        self._text = append_to(self.run.logs / "driver.log")
        self._wandb: WandbLog | None = None
        self._display = display or choose_display(run_dir.name, n_steps)
        if moved:
            self.note(moved)
        if mode is not Wandb.none:
            self._wandb = WandbLog(config, read_yaml(resolved_yaml), run_dir, mode)
        self._note_places()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._clock.enter(name)
        self._display.phase(name)
        try:
            yield
        finally:
            self._display.phase(self._clock.leave())

    def log(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """One line of metrics: what the caller measured, the split of the time since the last line, progress."""
        line = {name: _number(value) for name, value in metrics.items()}
        line |= self._clock.finish_step()
        line |= {"progress/step": step, "progress/elapsed_s": time.perf_counter() - self._begun}
        line |= {name: value for name, value in _derived(line).items() if name not in line}
        self._warn_unknown(line)
        self._metrics.write(encode_line(line) + "\n")
        self._metrics.flush()
        if self._wandb:
            self._wandb.log(step, line)
        eta_s = self._estimate_left(step, line["time/step"])
        self._last_step = step
        self._display.step(step, line, eta_s)
        self._write_text(step_line(step, self._n_steps, line, eta_s))
        return line

    def note(self, text: str) -> None:
        self._display.note(text)
        self._write_text(text)

    def rollouts(self, step: int, scored: Sequence[Scored], **columns: Unpack[Columns]) -> None:
        """rollouts/step_N.parquet: the input of replay, and of the report's histograms."""
        from megatron_rl.runs.rollout_file import write_rollouts

        write_rollouts(self.run.rollouts / f"step_{step}.parquet", scored, **columns)

    def close(self, state: str = "finished", reason: str = "") -> None:
        """Says how it ended, in status.json first: whatever fails after that, the run's state is known."""
        if self._closed:
            return
        if state not in ENDED:
            raise ValueError(f"state {state!r}: use one of {', '.join(ENDED)}")
        self._closed = True
        self._metrics.close()
        more: dict[str, Any] = {"step": self._last_step, "steps": self._n_steps}
        mark_status(self.run.path, state, reason, unknown_metrics=sorted(self._unknown), **more)
        self._display.phase("report")
        self._write_report()
        self._display.close()
        self.note(f"{state} after {duration(time.perf_counter() - self._begun)}" + (f": {reason}" if reason else ""))
        self.note(describe_contents(self.run))
        if self._wandb:
            self._wandb.close(state)
        self._text.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, (KeyboardInterrupt, SystemExit)):
            self.close("stopped", str(error) or "interrupted")
        else:
            self.close("failed", f"{kind.__name__}: {error}")

    def _write_report(self) -> None:
        if not self.run.metrics.stat().st_size:
            return
        try:
            from megatron_rl.runs.report import write_report

            write_report([self.run.path], self.run.report)
        except Exception as error:  # a report must never hide how the run itself ended
            self.note(f"report.html was not written: {type(error).__name__}: {error}")

    def _note_places(self) -> None:
        path = shlex.quote(str(self.run.path))
        self.note(f"run      {path}")
        self.note(f"metrics  tail -f {path}/metrics.jsonl")
        self.note(f"logs     tail -F {path}/logs/attempt_{self.run.attempt}/*")
        if self._wandb:
            self.note(f"wandb    {self._wandb.where}")

    def _warn_unknown(self, names: Mapping[str, float]) -> None:
        for name in unknown(names):
            if name not in self._unknown:
                self._unknown.add(name)
                warnings.warn(f"metric {name!r} is not in runs/metrics.py", UnknownMetricWarning, stacklevel=3)

    def _estimate_left(self, step: int, seconds: float) -> float | None:
        if step > 0:  # step 0 holds the start of the engines
            self._step_times.append(seconds)
        recent = self._step_times[-ETA_STEPS:]
        return math.fsum(recent) / len(recent) * (self._n_steps - step) if recent and step < self._n_steps else None

    def _write_text(self, text: str) -> None:
        self._text.write(text + "\n")
        self._text.flush()


def describe_contents(run: RunDir) -> str:
    n_rollouts = len(list(run.rollouts.glob("step_*.parquet")))
    n_checkpoints = sum(1 for entry in run.checkpoints.iterdir() if entry.is_dir()) if run.checkpoints.is_dir() else 0
    with run.metrics.open("rb") as lines:
        n_lines = sum(1 for _ in lines)
    rows = [
        ("metrics.jsonl", f"{n_lines} lines"),
        ("rollouts/", f"{n_rollouts} recorded steps") if n_rollouts else None,
        ("checkpoints/", f"{n_checkpoints} checkpoints") if n_checkpoints else None,
        (f"logs/attempt_{run.attempt}/", ""),
        ("report.html", "opens offline") if run.report.exists() else None,
    ]
    lines_ = [f"in {run.path}/:", *(f"  {name:<18}{about}".rstrip() for name, about in filter(None, rows))]
    return "\n".join(lines_)


def _derived(line: Mapping[str, float]) -> dict[str, float]:
    derived = {}
    if line["time/step"] > 0 and "time/sync" in line:
        derived["perf/sync_fraction"] = line["time/sync"] / line["time/step"]
    if "rollout/tokens" in line and line.get("time/rollout", 0.0) > 0:
        derived["perf/rollout_tokens_per_s"] = line["rollout/tokens"] / line["time/rollout"]
    return derived


def _number(value: Any) -> float:
    """Also takes one-element tensors and NumPy scalars."""
    return value if isinstance(value, int) and not isinstance(value, bool) else float(value)
