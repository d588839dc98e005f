"""The learning curves of a comparison as one static picture, for pages of text."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_rl.runs.metrics_file import ACCURACY
from megatron_rl.workshop.comparison.comparison import Cell, Comparison
from megatron_rl.workshop.comparison.figures import colour_of
from megatron_rl.workshop.reports.figures import INK
from megatron_rl.workshop.reports.svg import Plot, legend, nice_ticks, picture

PANEL, GAP, LEFT, TOP, BOTTOM, TALL = 340, 50, 46, 74, 36, 220
ABREAST = 3


def comparison_svg(comparison: Comparison) -> str:
    """A panel for each place: the mean of the seeds, in a band from the lowest to the highest."""
    beside = comparison.beside()
    drawn = [(place, cells) for place, cells in comparison.places().items() if any(map(_curve, cells))]
    ranges = [cell.curve(ACCURACY) for _, cells in drawn for cell in cells]
    if beside is not None:
        ranges.append(beside.curve(ACCURACY))
    heights = [value for low, _, high in ranges for value in (*low.values, *high.values)] or [0.0, 1.0]
    lengths = [step for _, mean, _ in ranges for step in mean.steps] or [0, 1]
    ticks, steps = nice_ticks(min(heights), max(heights)), (min(lengths), max(max(lengths), min(lengths) + 1))
    names = {cell.labels[-1]: colour_of(comparison, cell) for _, cells in drawn for cell in cells}
    entries = [*names.items(), *([(beside.name, INK)] if beside else [])]
    parts = list(legend(LEFT, entries))
    for number, (place, cells) in enumerate(drawn):
        left, top = number % ABREAST * (PANEL + GAP) + LEFT, number // ABREAST * (TALL + TOP + BOTTOM) + TOP
        plot = Plot(left, top, left + PANEL, top + TALL, steps, ticks)
        parts += plot.frame(f"{' / '.join(place) or comparison.name}: held-out accuracy")
        parts += _lines(comparison, plot, cells, beside)
    rows = -(-max(len(drawn), 1) // ABREAST)
    return picture(LEFT + min(len(drawn) or 1, ABREAST) * (PANEL + GAP), rows * (TALL + TOP + BOTTOM), parts)


def _lines(comparison: Comparison, plot: Plot, cells: list[Cell], beside: Cell | None) -> Iterable[str]:
    for cell in cells:
        low, mean, high = cell.curve(ACCURACY)
        if mean:
            yield plot.band(low, high, colour_of(comparison, cell))
            yield plot.line(mean, colour_of(comparison, cell))
    if beside is not None and (mean := beside.curve(ACCURACY)[1]):
        yield plot.line(mean, INK, ' stroke-dasharray="5 4"')


def _curve(cell: Cell) -> bool:
    return bool(cell.curve(ACCURACY)[1])
