"""The page of a comparison: what it says, its cells in a table, their curves, and its runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

import plotly.graph_objects as go

from megatron_rl.files import write_whole
from megatron_rl.runs.metrics_file import ACCURACY, AREA, MISMATCH, NUMBERS, SAMPLE_SIZE, Series
from megatron_rl.workshop.comparison.comparison import Cell, Comparison
from megatron_rl.workshop.comparison.findings import TEST, said
from megatron_rl.workshop.reports.figures import INK, PALETTE, layout
from megatron_rl.workshop.reports.report import body, chip, document, section, table
from megatron_rl.workshop.reports.run_data import RunData
from megatron_rl.workshop.reports.sections import UNIT, Panel

SEEDS = "mean of the seeds, and from the lowest to the highest"


def write_comparison(comparison: Comparison, runs: Sequence[RunData], output: Path) -> None:
    """`runs`: those of its cells that can be read. A few are shown beside each other too, as any runs are."""
    parts = [f"<header><h1>{escape(comparison.name)}</h1></header>", _said(comparison), _cells(comparison)]
    parts += [section(heading, shown) for heading, shown in _figures(comparison).items() if shown]
    parts.append(_runs(comparison, {run.name: run for run in runs}, output))
    if 0 < len(runs) <= len(PALETTE):
        parts.append(body(runs, "The runs beside each other"))
    write_whole(output, document(comparison.name, "\n".join(parts)))


def _said(comparison: Comparison) -> str:
    first, *rest = said(comparison)
    items = "".join(f"<li>{escape(one)}</li>" for one in rest)
    return f"<section><h2>Recommendation</h2><p><b>{escape(first)}</b></p><ul>{items}</ul><p>{TEST}</p></section>"


def _cells(comparison: Comparison) -> str:
    shown = [name for name in NUMBERS if any(cell.by_seed(name) for cell in comparison.cells)]
    rows = []
    for cell in comparison.cells:
        named = [*map(escape, cell.labels[:-1]), chip(cell.labels[-1], colour_of(comparison, cell))]
        rows.append([*named, f"{len(cell.finished)} of {len(cell.results)}", *(cell.written(name) for name in shown)])
    about = "".join(
        f"<li><b>{NUMBERS[name].title}</b>: {NUMBERS[name].about}</li>" for name in shown if NUMBERS[name].about
    )
    head = [*map(escape, comparison.axes), "finished", *(NUMBERS[name].title for name in shown)]
    return f"<h2>Cells</h2><p>Each: {SEEDS}.</p>{table(head, rows)}<ul>{about}</ul>"


def _figures(comparison: Comparison) -> dict[str, list[Panel]]:
    beside = comparison.beside()
    about = f"{SEEDS.capitalize()}{f'; dashed: {beside.name}' if beside else ''}."
    return {
        "Held-out accuracy": panels(comparison, ACCURACY, about, y_range=UNIT),
        "Mismatch of sampler and learner, k3 KL in nats a token": panels(comparison, MISMATCH, about, log=True),
        "Effective sample size": panels(comparison, SAMPLE_SIZE, about),
        "What it comes to": [
            Panel(title, f"{SEEDS.capitalize()}.", figure, wide=True)
            for name, title in ((AREA, "Area under the accuracy curve"), ("step_s", "Time of a step"))
            if (figure := bars(comparison, name, NUMBERS[name].about))
        ],
    }


def _runs(comparison: Comparison, runs: dict[str, RunData], output: Path) -> str:
    rows = []
    for cell in comparison.cells:
        for one in cell.results:
            run = runs.get(one.name)
            page = run.path / "report.html" if run else None
            name = escape(one.name)
            if page is not None and page.is_file():
                name = f"<a href='{escape(os.path.relpath(page, output.parent))}'>{name}</a>"
            values = [f"{one.numbers[key]:{NUMBERS[key].form}}" if key in one.numbers else "" for key in NUMBERS]
            rows.append([name, escape(one.state), *values])
    return "<h2>Runs</h2>" + table(["run", "state", *(number.title for number in NUMBERS.values())], rows)


BAND = 0.15  # opacity
REFERENCE = {"color": INK, "width": 2, "dash": "dash"}


def colour_of(comparison: Comparison, cell: Cell) -> str:
    """A label's colour, the same wherever it is drawn."""
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
