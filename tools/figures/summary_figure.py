"""One static SVG about one or several runs, for a README: held-out accuracy, reward and mismatch
side by side. Of runs with an environment it shows the tool's calls in place of the reward.

python tools/figures/summary_figure.py docs/quickstart.svg runs/quickstart [RUN ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron_rl.runs.metrics_file import Series
from megatron_rl.workshop.reports.charts import colour, running_mean, smooth_window
from megatron_rl.workshop.reports.run_data import RunData, load_runs
from megatron_rl.workshop.reports.svg import LEFT, TITLE, Plot, heading, legend, nice_ticks, picture

WIDTH = 1200
HEIGHT = 330
KL = "rollout_corr/k3_kl"
CALLS = "session/tool_calls"
SESSIONS = "session/turn_0/sessions"


def write_summary_figure(run_dirs: Sequence[Path], output: Path) -> None:
    output.write_text(summary_svg(load_runs(run_dirs)), encoding="utf-8")


def summary_svg(runs: Sequence[RunData]) -> str:
    reward = next(
        (name for run in runs if (name := run.first_of("reward/sampler_mean", "reward/mean"))),
        "reward/mean",
    )
    sampled = any(run.setting("eval.temperature") for run in runs)
    panels: list[tuple[str, Callable[[RunData], Series], bool, float | None]] = [
        (
            f"Held-out accuracy ({'sampled' if sampled else 'greedy'})",
            lambda run: run.series("eval/accuracy"),
            True,
            1.0,
        ),
        ("Calls of a tool in each session", lambda run: _smooth(calls(run)), False, None)
        if any(run.first_of(CALLS) for run in runs)
        else ("Reward of sampled answers", lambda run: _smooth(run.series(reward, 1)), False, 1.0),
        (
            "Sampler / learner mismatch, KL in nats",
            lambda run: _smooth(run.series(KL, 1)),
            False,
            None,
        ),
    ]
    parts = list(legend(LEFT, [(run.name, colour(number)) for number, run in enumerate(runs)]))
    for index, (title, of, dots, top) in enumerate(panels):
        parts.append(_panel(index, title, [of(run) for run in runs], dots, top))
    return picture(WIDTH, HEIGHT, parts)


def _panel(
    index: int, title: str, series: Sequence[Series], dots: bool, top_value: float | None
) -> str:
    values = [value for one in series for value in one.finite]
    steps = [step for one in series for step in one.steps] or [0]
    if top_value is None:
        most = max(values, default=0.0)
    else:
        most = max([top_value, *values])
    ticks = nice_ticks(min([0.0, *values]), most)
    plot = Plot.number(index, (min(steps), max(max(steps), min(steps) + 1)), ticks)
    if not values:
        return heading(plot.left, plot.top - TITLE, title)
    parts = list(plot.frame(title))
    for number, one in enumerate(series):
        paint = colour(number)
        parts.append(plot.line(one, paint))
        if dots:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{paint}"/>'
                for x, y in plot.points(one)
            ]
    return "\n".join(parts)


def calls(run: RunData) -> Series:
    """Calls of tools over the sessions of each step."""
    made = run.series(CALLS, 1)
    sessions = run.series(SESSIONS, 1)
    return Series(
        made.steps,
        [one / max(1.0, all) for one, all in zip(made.values, sessions.values, strict=True)],
    )


def _smooth(series: Series) -> Series:
    return Series(series.steps, running_mean(series.values, smooth_window(series)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the SVG")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    options = parser.parse_args()
    write_summary_figure(options.runs, options.output)
