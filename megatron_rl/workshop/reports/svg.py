"""Line charts as SVG text for docs, drawn by no plotting library: the same bytes everywhere,
readable in a diff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from megatron_rl.runs.metrics_file import Series
from megatron_rl.workshop.reports.charts import FONT, GRID, INK, MUTED

AXIS_TITLE = 31  # below the plot
TITLE = 16  # above it
# of charts beside each other
PANEL = 340
GAP = 50
LEFT = 46
TOP = 74
BOTTOM = 36
TALL = 220
ABREAST = 3
Ticks = Sequence[tuple[float, str]]


def picture(width: float, height: float, parts: Iterable[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="{FONT}"'
    ground = f'<rect width="{width:g}" height="{height:g}" fill="#ffffff"/>'
    return "\n".join([f'{head} font-size="12">', ground, *parts, "</svg>"]) + "\n"


def panels_picture(count: int, parts: Iterable[str]) -> str:
    """A picture of so many charts, `ABREAST` in a row."""
    rows = -(-max(count, 1) // ABREAST)
    return picture(
        LEFT + min(count or 1, ABREAST) * (PANEL + GAP), rows * (TALL + TOP + BOTTOM), parts
    )


@dataclass(frozen=True)
class Plot:
    """The place of one chart, and what its axes reach over."""

    left: float
    top: float
    right: float
    bottom: float
    steps: tuple[float, float]
    ticks: Sequence[float]  # of values: from the lowest to the highest that are shown
    x_title: str = "step"

    @classmethod
    def number(cls, number: int, steps: tuple[float, float], ticks: Sequence[float]) -> Plot:
        """One of several charts beside and below each other."""
        left = number % ABREAST * (PANEL + GAP) + LEFT
        top = number // ABREAST * (TALL + TOP + BOTTOM) + TOP
        return cls(left, top, left + PANEL, top + TALL, steps, ticks)

    def x(self, step: float) -> float:
        first, last = self.steps
        return self.left + (step - first) / (last - first) * (self.right - self.left)

    def y(self, value: float) -> float:
        low = self.ticks[0]
        high = self.ticks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def frame(self, title: str, x_ticks: Ticks = ()) -> Iterable[str]:
        yield heading(self.left, self.top - TITLE, title)
        for tick in self.ticks:
            y = f"{self.y(tick):.1f}"
            yield f'<line x1="{self.left}" y1="{y}" x2="{self.right}" y2="{y}" stroke="{GRID}"/>'
            yield small(self.left - 7, self.y(tick) + 4, "end", f"{tick:g}")
        for tick, text in x_ticks or [(tick, f"{tick:g}") for tick in nice_ticks(*self.steps)]:
            if self.steps[0] <= tick <= self.steps[1]:
                yield small(self.x(tick), self.bottom + 17, "middle", text)
        yield small(self.right, self.bottom + AXIS_TITLE, "end", self.x_title)

    def line(self, series: Series, colour: str, more: str = "") -> str:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in self.points(series))
        stroke = f'stroke="{colour}" stroke-width="2.2" stroke-linejoin="round"{more}'
        return f'<polyline points="{path}" fill="none" {stroke}/>'

    def band(self, low: Series, high: Series, colour: str) -> str:
        path = " ".join(
            f"{x:.1f},{y:.1f}" for x, y in [*self.points(high), *reversed(self.points(low))]
        )
        return f'<polygon points="{path}" fill="{colour}" opacity="0.15"/>'

    def points(self, series: Series) -> list[tuple[float, float]]:
        return [
            (self.x(s), self.y(v))
            for s, v in zip(series.steps, series.values, strict=True)
            if math.isfinite(v)
        ]


def heading(x: float, y: float, title: str) -> str:
    return f'<text x="{x}" y="{y}" font-size="14" font-weight="600" fill="{INK}">{escape(title)}</text>'


def small(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{MUTED}" text-anchor="{anchor}" font-size="11">{text}</text>'


def legend(left: float, entries: Sequence[tuple[str, str]]) -> Iterable[str]:
    """Names in their colours, in one line."""
    for name, colour in entries:
        yield f'<rect x="{left:.0f}" y="16" width="12" height="12" rx="3" fill="{colour}"/>'
        yield f'<text x="{left + 18:.0f}" y="27" font-size="13" fill="{INK}">{escape(name)}</text>'
        left += 18 + 7.6 * len(name) + 26


def nice_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that enclose [low, high]."""
    span = (high - low) or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    size = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    start = math.floor(low / size + 1e-9)
    stop = math.ceil(high / size - 1e-9)
    return [round(number * size, 12) for number in range(start, max(stop, start + 1) + 1)]
