"""One static SVG about one or several runs, for a README: held-out accuracy, reward and mismatch side by side.

    python tools/figures/summary_figure.py docs/quickstart.svg runs/quickstart [RUN ...]

Written by hand: three small charts need no plotting library, and the file stays readable in a diff.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from megatron_rl.runs.report_figures import FONT, GRID, INK, MUTED, PALETTE, running_mean
from megatron_rl.runs.run_data import RunData, Series, load_runs

WIDTH, HEIGHT = 1200, 330
PANEL, GAP, LEFT, TOP, BOTTOM = 340, 50, 46, 74, 36


def write_summary_figure(run_dirs: Sequence[Path], output: Path) -> None:
    output.write_text(summary_svg(load_runs(run_dirs)), encoding="utf-8")


def summary_svg(runs: Sequence[RunData]) -> str:
    reward = next((name for run in runs if (name := run.first_of("reward/sampler_mean", "reward/mean"))), "reward/mean")
    panels: list[tuple[str, Callable[[RunData], Series], bool, float | None]] = [
        ("Held-out accuracy (greedy)", lambda run: run.series("eval/accuracy"), True, 1.0),
        ("Reward of sampled answers", lambda run: _smooth(run.series(reward, 1)), False, 1.0),
        (
            "Sampler / learner mismatch, KL in nats",
            lambda run: _smooth(run.series("rollout_corr/k3_kl", 1)),
            False,
            None,
        ),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="{FONT}" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _legend(runs),
    ]
    for index, (title, of, dots, top) in enumerate(panels):
        parts.append(_panel(index * (PANEL + GAP) + LEFT, title, [of(run) for run in runs], dots, top))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, title: str, series: Sequence[Series], dots: bool, top_value: float | None) -> str:
    right, bottom = left + PANEL, HEIGHT - BOTTOM
    values = [value for one in series for value in one.finite]
    steps = [step for one in series for step in one.steps]
    parts = [f'<text x="{left}" y="{TOP - 16}" font-size="14" font-weight="600" fill="{INK}">{escape(title)}</text>']
    if not values:
        return parts[0]
    low = min(0.0, *values)
    ticks = nice_ticks(low, max(values) if top_value is None else max(top_value, *values))
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return left + (step - first) / (last - first) * (right - left)

    def y(value: float) -> float:
        return bottom - (value - ticks[0]) / (ticks[-1] - ticks[0]) * (bottom - TOP)

    for tick in ticks:
        parts.append(f'<line x1="{left}" y1="{y(tick):.1f}" x2="{right}" y2="{y(tick):.1f}" stroke="{GRID}"/>')
        parts.append(_small(left - 7, y(tick) + 4, "end", f"{tick:g}"))
    parts += [
        _small(x(tick), bottom + 17, "middle", f"{tick:g}") for tick in nice_ticks(first, last) if first <= tick <= last
    ]
    parts.append(_small(right, bottom + 31, "end", "step"))
    for number, one in enumerate(series):
        points = [(x(s), y(v)) for s, v in zip(one.steps, one.values, strict=True) if math.isfinite(v)]
        colour = PALETTE[number % len(PALETTE)]
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"/>'
        )
        if dots:
            parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" fill="{colour}"/>' for px, py in points]
    return "\n".join(parts)


def _small(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{MUTED}" text-anchor="{anchor}" font-size="11">{text}</text>'


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    start, stop = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [round(number * size, 12) for number in range(start, max(stop, start + 1) + 1)]


def _legend(runs: Sequence[RunData]) -> str:
    parts, left = [], float(LEFT)
    for number, run in enumerate(runs):
        colour = PALETTE[number % len(PALETTE)]
        parts.append(f'<rect x="{left:.0f}" y="16" width="12" height="12" rx="3" fill="{colour}"/>')
        parts.append(f'<text x="{left + 18:.0f}" y="27" font-size="13" fill="{INK}">{escape(run.name)}</text>')
        left += 18 + 7.6 * len(run.name) + 26
    return "\n".join(parts)


def _smooth(series: Series) -> Series:
    return Series(series.steps, running_mean(series.values, max(1, len(series.values) // 12)))


if __name__ == "__main__":
    write_summary_figure([Path(name) for name in sys.argv[2:]], Path(sys.argv[1]))
