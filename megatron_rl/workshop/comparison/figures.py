"""Figures of a comparison: a line is the mean of a cell's seeds, its band reaches from the lowest to the highest."""

from __future__ import annotations

import plotly.graph_objects as go

from megatron_rl.runs.metrics_file import Series
from megatron_rl.workshop.comparison.comparison import Cell, Comparison
from megatron_rl.workshop.reports.figures import INK, PALETTE, layout
from megatron_rl.workshop.reports.sections import Panel

BAND = 0.15  # opacity
REFERENCE = {"color": INK, "width": 2, "dash": "dash"}


def colour_of(comparison: Comparison, cell: Cell) -> str:
    """The same for a label wherever it is drawn."""
    if cell.labels == comparison.reference:
        return INK
    return PALETTE[comparison.compared.index(cell.labels[-1]) % len(PALETTE)]


def panels(
    comparison: Comparison, metric: str, about: str, *, log: bool = False, y_range: tuple[float, float] | None = None
) -> list[Panel]:
    """One for each place, those of several without anything to draw left out."""
    found = []
    for place, cells in comparison.places().items():
        if figure := _curves(comparison, cells, metric, log, y_range):
            found.append(Panel(" / ".join(place) or comparison.name, about, figure))
    return found


def _curves(
    comparison: Comparison, cells: list[Cell], metric: str, log: bool, y_range: tuple[float, float] | None
) -> go.Figure | None:
    figure = go.Figure()
    for cell in cells:
        low, mean, high = cell.curve(metric)
        if not mean:
            continue
        colour = colour_of(comparison, cell)
        if len(cell.results) > 1:
            _band(figure, low, high, colour)
        figure.add_scatter(
            x=mean.steps, y=mean.values, name=cell.labels[-1], line={"color": colour, "width": 2}, mode="lines",
            hovertemplate="%{y:.4g}",
        )  # fmt: skip
    beside = comparison.beside()
    if figure.data and beside is not None and (mean := beside.curve(metric)[1]):
        figure.add_scatter(
            x=mean.steps, y=mean.values, name=beside.name, line=REFERENCE, mode="lines", hovertemplate="%{y:.4g}"
        )
    if not figure.data:
        return None
    layout(figure, legend=True)
    if log:
        figure.update_yaxes(type="log", exponentformat="power")
    if y_range:
        figure.update_yaxes(range=list(y_range))
    return figure


def _band(figure: go.Figure, low: Series, high: Series, colour: str) -> None:
    figure.add_scatter(
        x=[*high.steps, *reversed(low.steps)], y=[*high.values, *reversed(low.values)], fill="toself",
        fillcolor=colour, opacity=BAND, line={"width": 0}, mode="lines", hoverinfo="skip", showlegend=False,
    )  # fmt: skip


def bars(comparison: Comparison, number: str, x_title: str) -> go.Figure | None:
    """The mean of each cell; the whisker reaches from the lowest seed to the highest."""
    cells = [cell for cell in comparison.cells if cell.by_seed(number)]
    if not cells:
        return None
    values = [list(cell.by_seed(number).values()) for cell in cells]
    means = [sum(one) / len(one) for one in values]
    figure = go.Figure()
    figure.add_bar(
        x=means,
        y=[cell.name for cell in cells],
        orientation="h",
        marker={"color": [colour_of(comparison, cell) for cell in cells]},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [max(one) - mean for one, mean in zip(values, means, strict=True)],
            "arrayminus": [mean - min(one) for one, mean in zip(values, means, strict=True)],
            "thickness": 1.2,
        },
        hovertemplate="%{x:.3f}",
    )
    layout(figure, hover="closest")
    figure.update_layout(height=90 + 26 * len(cells), bargap=0.35)
    figure.update_xaxes(title={"text": x_title})
    return figure.update_yaxes(autorange="reversed", showgrid=False)
