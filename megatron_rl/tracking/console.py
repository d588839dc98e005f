"""Console output of a run: a line per step or a live table, the phase of a run without output,
selected responses; tables, durations, sparklines as text.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import numpy as np
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from megatron_rl.files import last_lines
from megatron_rl.logs import logger
from megatron_rl.processes.heartbeat import ACTIVITY
from megatron_rl.processes.process import printable
from megatron_rl.tracking.metrics import accuracies
from megatron_rl.tracking.metrics_file import MISMATCH
from megatron_rl.types import Metrics, Scored, Verdict

if TYPE_CHECKING:
    import torch

Row = tuple[str, str, str]  # name, short label, how to print it
SHOWN: tuple[Row, ...] = (
    ("reward/sampler_mean", "reward", ".3f"),
    ("reward/mean", "trained reward", ".3f"),
    ("loss/total", "loss", ".4f"),
    ("loss/entropy", "entropy", ".3f"),
    ("optim/grad_norm", "grad", ".3f"),
    ("rollout_corr/k3_kl", "mismatch", ".2e"),
    ("rollout_corr/rollout_is_eff_sample_size", "ess", ".3f"),
    ("rollout/response_tokens_mean", "length", ".1f"),
    ("perf/rollout_tokens_per_s", "tok/s", ".0f"),
    ("time/step", "seconds", ".2f"),
)
# these are in the live table only: a line has to fit
LIVE_ONLY = {"reward/mean", "loss/entropy", "rollout/response_tokens_mean"}
LONG = 1e9  # from here on numbers have an exponent
BARS = "▁▂▃▄▅▆▇█"
TREND = 32
WIDTH = 60  # characters of a sample's prompt, and of its response, on a line
QUIET_S = 10.0
RARELY_S = 300.0
SAID = re.compile(r"INFO [\d :-]+\[\S+\] (.+)")  # progress message of vLLM
SAID_LINES = 100
SAID_WIDTH = 70


def choose_display(
    title: str, n_steps: int, stream: TextIO | None = None, logs: Path | None = None
) -> Display:
    """`logs`: folder of the engines' logs, which say what takes so long at the start."""
    stream = stream or sys.stdout
    if is_live(stream):
        return LiveDisplay(title, n_steps, Console(file=stream), logs)
    return PlainDisplay(stream)


def is_live(stream: TextIO) -> bool:
    console = Console(file=stream)
    return console.is_terminal and not console.is_dumb_terminal


def said_by_engines(logs: Path | None) -> str:
    """Return the latest message in the engines' logs."""
    with suppress(OSError):  # a log that was removed
        files = sorted(logs.glob("sampler*.log") if logs else (), key=os.path.getmtime)
        if files and (said := SAID.findall("\n".join(last_lines(files[-1], SAID_LINES)))):
            return f"; vLLM: {printable(said[-1])[:SAID_WIDTH]}"
    return ""


class Silence:
    """Prints the phase of a run whose driver has written nothing for ten seconds: every ten seconds
    while it starts, then ever more rarely. Where a table is drawn, only until it is there.
    """

    def __init__(
        self, logs: Path, stream: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._logs = logs
        self._stream = stream or sys.stdout
        self._clock = clock
        self._live = is_live(self._stream)
        self._begun = clock()
        self._due_s = QUIET_S

    def look(self, phase_now: Callable[[], str]) -> None:
        written = self._begun
        text = self._logs / "driver.log"
        with suppress(OSError):
            written = max(written, text.stat().st_mtime)
            if self._live:
                return
        quiet_s = self._clock() - written
        if quiet_s < QUIET_S:
            self._due_s = QUIET_S
        if quiet_s < self._due_s:
            return
        starts = not text.is_file() or " train: step " not in text.read_text(encoding="utf-8")
        self._due_s = quiet_s + (QUIET_S if starts else min(quiet_s, RARELY_S))
        more = said_by_engines(self._logs) if starts else ""
        phase = "engines start" if more else phase_now()
        logger("launcher").info(f"{phase}, {duration(quiet_s)}{more}")


def shown(names: Iterable[str], others: Iterable[Row] = SHOWN) -> list[Row]:
    """Rows of a display: each evaluated set, and the rest."""
    return [*((name, label, ".3f") for name, label in accuracies(names).items()), *others]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns two spaces apart, as lines. From the second on, those whose first row is a number
    stand to the right.
    """
    lines = [list(head), *map(list, rows)]
    for column in range(len(head)):
        width = max(len(line[column]) for line in lines)
        if column and lines[1:] and re.match(r"[+-]?\d", lines[1][column]):
            place = str.rjust
        else:
            place = str.ljust
        for line in lines:
            line[column] = place(line[column], width)
    return ["  ".join(line).rstrip() for line in lines]


def duration(seconds: float) -> str:
    total = round(seconds)
    hours = total // 3600
    minutes = total // 60 % 60
    if hours:
        return f"{hours}h{minutes:02d}m"
    if minutes:
        return f"{minutes}m{total % 60:02d}s"
    return f"{total}s"


def step_line(step: int, n_steps: int, metrics: Metrics, eta_s: float | None) -> str:
    parts = [f"step {step:>{len(str(n_steps))}}/{n_steps}"]
    for name, label, form in shown(metrics):
        if name == "time/step" and name in metrics:
            parts.append(f"{number(metrics[name], form)} s")
        elif name in metrics and name not in LIVE_ONLY:
            parts.append(f"{label} {number(metrics[name], form)}{staleness(name, metrics)}")
    if eta_s is not None:
        parts.append(f"left {duration(eta_s)}")
    return "  ".join(parts)


def number(value: float, form: str) -> str:
    """Format a value; long ones get an exponent."""
    return format(value, form if abs(value) < LONG else ".3e")


def staleness(name: str, metrics: Metrics) -> str:
    """Note beside the mismatch of stale responses, which is not the engines' numerics."""
    steps = metrics.get("rollout/staleness_mean", 0.0)
    if name == MISMATCH and steps > 0:
        return f" (staleness: {steps:.2g} steps)"
    return ""


def sparkline(values: list[float]) -> str:
    """The last values as bars between their minimum and maximum; a gap where not finite."""
    finite = [value for value in values if math.isfinite(value)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    bars = []
    for value in values:
        if not math.isfinite(value):
            bars.append(" ")
        elif span:
            bars.append(BARS[int((value - low) / span * (len(BARS) - 1))])
        else:
            bars.append(BARS[len(BARS) // 2])
    return "".join(bars)


class PlainDisplay:
    shows_steps = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase(self, name: str | None) -> None:
        pass

    def step(self, step: int, metrics: Metrics, eta_s: float | None) -> None:
        pass

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class LiveDisplay:
    """Rich draws it from a thread of its own, so the spinner turns while the driver is busy."""

    shows_steps = True

    def __init__(
        self, title: str, n_steps: int, console: Console, logs: Path | None = None
    ) -> None:
        self._title = title
        self._n_steps = n_steps
        self._logs = logs
        self._history: dict[str, list[float]] = {}
        self._last: Metrics = {}  # metrics of the last step
        self._step: int | None = None
        self._eta_s: float | None = None
        self._eta_at = time.monotonic()
        self._doing: str | None = None  # the phase
        self._since = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=5, transient=False
        )
        self._live.start()

    def phase(self, name: str | None) -> None:
        self._doing = name
        self._since = time.monotonic()

    def step(self, step: int, metrics: Metrics, eta_s: float | None) -> None:
        for name, _, _ in shown(metrics):
            if name in metrics:
                self._history.setdefault(name, []).append(metrics[name])
        self._last = metrics
        self._step = step
        self._eta_s = eta_s
        self._eta_at = time.monotonic()

    def note(self, text: str) -> None:
        shown = printable(text)
        self._live.console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self.phase("done")
        self._live.stop()

    def _draw(self) -> Group:
        head = Text(self._title, style="bold")
        if self._step is not None:
            head.append(f"   step {self._step}/{self._n_steps}", style="not bold")
        if self._eta_s is not None:
            left = max(0.0, self._eta_s - (time.monotonic() - self._eta_at))
            head.append(f"   {duration(left)} left", style="not bold dim")
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        table.add_column(style="dim")
        table.add_column(justify="right")
        table.add_column(style="cyan", no_wrap=True)
        for name, label, form in shown(self._history):
            if name in self._history:
                values = self._history[name]
                last = number(values[-1], form) + staleness(name, self._last)
                table.add_row(label, last, sparkline(values[-TREND:]))
        self._spinner.update(text=Text(self._at()))
        return Group(head, table, self._spinner)

    def _at(self) -> str:
        """The present phase, and for how long."""
        doing = self._doing or ACTIVITY.outside
        seconds = int(time.monotonic() - self._since)
        if seconds < QUIET_S:
            return doing
        said = said_by_engines(self._logs) if self._step is None else ""
        return f"{doing}, {duration(seconds)}{said}"


Display = PlainDisplay | LiveDisplay


def choose(scored: Sequence[Scored], prox_logprobs_N: torch.Tensor | None) -> list[int]:
    """Return indices of responses to show: the first right one, the first wrong one, the one with
    the largest mismatch.
    """
    right = [place for place, one in enumerate(scored) if one.verdict == Verdict.right]
    other = [place for place, one in enumerate(scored) if one.verdict != Verdict.right]
    found = [*right[:1], *other[:1]]
    if prox_logprobs_N is not None:
        lengths = [len(one.rollout.logprobs) for one in scored]
        differences = [
            difference(one, prox)
            for one, prox in zip(scored, prox_logprobs_N.split(lengths), strict=True)
        ]
        known = [place for place, value in enumerate(differences) if math.isfinite(value)]
        if known:
            found.append(max(known, key=differences.__getitem__))
    return list(dict.fromkeys(found))


def difference(one: Scored, prox: torch.Tensor) -> float:
    """Return the mean of abs d over the response's tokens; NaN if unknown."""
    if not len(prox):
        return math.nan
    return float(np.abs(prox.numpy() - np.asarray(one.rollout.logprobs)).mean())


def finding(verdict: str | None, error: str | None) -> str:
    return error or (verdict or "not judged").replace("_", " ")


def sample_line(one: Scored) -> str:
    """Format a response on one line: end of the prompt, end of the response, reward."""
    prompt = _end(one.rollout.prompt.text)
    answer = _end(one.text)
    return f"{prompt} -> {answer}   {finding(one.verdict, one.error)}, reward {one.reward:g}"


def _end(text: str) -> str:
    short = " ".join(text.split())
    return repr(short if len(short) <= WIDTH else f"...{short[-WIDTH:]}")
