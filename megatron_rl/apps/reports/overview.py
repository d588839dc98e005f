"""`megatron-rl status` and `watch`: progress of runs, read from their files alone."""

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from megatron_rl.apps.reports.run_data import RunData, load_run
from megatron_rl.checkpoint import checkpoints
from megatron_rl.processes.process import printable
from megatron_rl.tracking.console import TREND, duration, shown, sparkline
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.tracking.status import ENDED, seconds_since

RECENT = 10  # steps, of which the rate is shown
SHOWN = (
    ("rollout/response_tokens_mean", "length", ".0f"),
    ("reward/sampler_mean", "reward", ".3f"),
)


def describe(path: Path) -> str:
    """Describe a run: state, rate, scores, alarms, and the step to resume from."""
    run = load_run(path)
    rows = [("", _state(run)), *_rows(run)]
    width = max(len(label) for label, _ in rows)
    lines = [f"  {label:<{width}}  {text}" if label else f"  {text}" for label, text in rows]
    return "\n".join([run.name, *lines])


def ended(path: Path) -> bool:
    """True if nothing more will be written; a status unreadable now may be readable later."""
    return load_run(path).status.get("state") in ENDED or not RunDir(path).status.exists()


def watch(paths: Sequence[Path], every_s: float, stream: TextIO | None = None) -> None:
    """Show runs until all have ended: a terminal is drawn anew, elsewhere changes are printed."""
    stream = stream or sys.stdout
    console = Console(file=stream)
    before = ""
    with (
        Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live
    ):
        while True:
            over = all(map(ended, paths))  # before they are shown, so that their end is
            now = "\n\n".join(map(describe, paths))
            if live is not None:
                live.update(Text(printable(now)), refresh=True)
            elif now != before:
                print(now, file=stream, flush=True)
                before = now
            if over:
                return
            time.sleep(every_s)


def _state(run: RunData) -> str:
    status = run.status
    state = str(status.get("state", "no status.json"))
    if status.get("host") and state not in ENDED:
        state += f" on {status['host']}"
    if status.get("attempt"):
        state += f", attempt {status['attempt']}"
    if status.get("reason"):
        state += f": {str(status['reason']).splitlines()[0]}"
    return state


def _rows(run: RunData) -> Iterator[tuple[str, str]]:
    planned = run.status.get("steps") or run.setting("run.steps", "?")
    parts = [f"{run.steps} of {planned}"]
    seconds = run.series("time/step", first_step=max(run.steps - RECENT + 1, 1)).finite
    if seconds:
        each = statistics.median(seconds)
        parts.append(f"{each:.1f} s each" if each < 60 else f"{duration(each)} each")
        if run.status.get("state") not in ENDED and isinstance(planned, int):
            parts.append(f"{duration((planned - run.steps) * each)} left")
    yield "step", ", ".join(parts)
    yield from _curves(run)
    yield from (("alarm", text) for text in _alarms(run.status.get("alarms")))
    if run.status.get("state") == "running" and (
        silent := seconds_since(run.status.get("heartbeat"))
    ):
        yield "sign of life", f"{duration(silent)} ago"
    kept = checkpoints.steps(RunDir(run.path).checkpoints)
    yield "checkpoint", f"step {kept[0]}, {len(kept)} kept" if kept else "none"
    yield "logs", str(RunDir(run.path).logs)
    yield from (("not readable", problem) for problem in run.unreadable)


def _curves(run: RunData) -> Iterator[tuple[str, str]]:
    for name, label, form in shown({name for line in run.lines for name in line}, SHOWN):
        values = run.series(name)
        if values:
            yield label, f"{values.finite[-1]:{form}}  {sparkline(values.values[-TREND:])}"


def _alarms(given: Any) -> Iterator[str]:
    """Each alarm with its step, value and bound."""
    for name, about in given.items() if isinstance(given, Mapping) else ():
        known = about if isinstance(about, Mapping) else {}
        yield ", ".join([str(name), *(f"{key} {value}" for key, value in known.items())])
