"""Curves of runs as one SVG for a page: held-out accuracy, further metrics, and the mismatch.

    python tools/figures/curve.py curve.svg runs/NAME [RUN ...] --panel reward/own/valid "Valid share"

Training metrics are running means over a twelfth of the steps; of the evaluations each is a dot.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from megatron_rl.apps.reports.charts import INK, LINE, MUTED, colour
from megatron_rl.apps.reports.run_data import RunData, load_runs
from megatron_rl.files import write_atomic

FONT = "Inter, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
ACCURACY = ("eval/accuracy", "Held-out accuracy")
MISMATCH = ("rollout_corr/k3_kl", "Mismatch of sampler and learner, k3 KL in nats")
LEFT = 46
TOP = 74
WIDTH = 340
HEIGHT = 220
GAP = 50
TICKS = 4


def svg(runs: Sequence[RunData], panels: Sequence[tuple[str, str]]) -> str:
    size = f"{LEFT + len(panels) * (WIDTH + GAP)} {TOP + HEIGHT + 40}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="{FONT}">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    left = LEFT
    for number, run in enumerate(runs):
        paint = colour(number)
        parts.append(f'<rect x="{left}" y="16" width="12" height="12" rx="3" fill="{paint}"/>')
        parts.append(_text(left + 18, 27, run.name, size=13))
        left += 44 + 8 * len(run.name)
    for number, (metric, title) in enumerate(panels):
        parts += _panel(LEFT + number * (WIDTH + GAP), metric, title, runs)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: int, metric: str, title: str, runs: Sequence[RunData]) -> Iterator[str]:
    evaluated = metric.startswith("eval/")
    lines = [_points(run, metric, evaluated) for run in runs]
    last = max([1, *(step for line in lines for step, _ in line)])
    most = max((value for line in lines for _, value in line), default=1.0)
    top = 1.0 if evaluated else _nice(most or 1.0)
    bottom = TOP + HEIGHT
    yield _text(left, TOP - 16, title, size=14)
    for tick in range(TICKS + 1):
        y = bottom - tick / TICKS * HEIGHT
        yield f'<path d="M{left} {y:g}h{WIDTH}" stroke="{LINE}"/>'
        yield _text(left - 7, y + 4, f"{top * tick / TICKS:.3g}", "end")
        step = round(last * tick / TICKS)
        yield _text(left + WIDTH * step / last, bottom + 17, str(step), "middle")
    yield _text(left + WIDTH, bottom + 32, "step", "end")
    for number, line in enumerate(lines):
        paint = colour(number)
        places = [
            (left + WIDTH * step / last, bottom - HEIGHT * value / top) for step, value in line
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        yield f'<polyline points="{path}" fill="none" stroke="{paint}" stroke-width="2.2"/>'
        if evaluated:
            for x, y in places:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.2" fill="{paint}"/>'


def _points(run: RunData, metric: str, evaluated: bool) -> list[tuple[int, float]]:
    """Return finite values by step; those of training are running means."""
    series = run.series(metric, 0 if evaluated else 1)
    points = [
        (step, value)
        for step, value in zip(series.steps, series.values, strict=True)
        if math.isfinite(value)
    ]
    half = 0 if evaluated else len(points) // 24
    means = []
    for place, (step, _) in enumerate(points):
        near = [value for _, value in points[max(0, place - half) : place + half + 1]]
        means.append((step, sum(near) / len(near)))
    return means


def _nice(most: float) -> float:
    """Return 1, 2, 4 or 10 times a power of ten, at least `most`."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(factor * power for factor in (1, 2, 4, 10) if factor * power >= most)


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 11) -> str:
    paint = MUTED if size == 11 else INK
    look = f'font-size="{size}" fill="{paint}" text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" {look}>{escape(text)}</text>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, metavar="SVG")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument(
        "--panel", nargs=2, action="append", default=[], metavar=("METRIC", "TITLE")
    )
    options = parser.parse_args()
    panels = [ACCURACY, *map(tuple, options.panel), MISMATCH]
    write_atomic(options.output, svg(load_runs(options.runs), panels))
