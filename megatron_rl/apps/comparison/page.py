"""HTML page of tools/compare_corrections.py: a comparison's findings, cells, curves and runs; W&B
gets its figures.
"""

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_rl.apps.comparison.comparison import Cell, Comparison
from megatron_rl.apps.comparison.findings import TEST, summary
from megatron_rl.apps.reports import charts, pages
from megatron_rl.apps.reports.pages import Named, Table
from megatron_rl.apps.reports.report import about
from megatron_rl.apps.reports.run_data import RunData
from megatron_rl.apps.reports.sections import Panel
from megatron_rl.files import write_atomic
from megatron_rl.tracking.metrics_file import (
    ACCURACY,
    AREA,
    IN_BF16,
    MISMATCH,
    NUMBERS,
    SAMPLE_SIZE,
)

ABREAST = 3  # charts in a row
SEEDS = "Mean over seeds, and from the lowest to the highest"


def write_comparison(comparison: Comparison, runs: Sequence[RunData], output: Path) -> None:
    """Write the page; a few `runs` are shown beside each other too, as any runs are."""
    shown = comparison.held(NUMBERS)
    recommended, *findings = summary(comparison)
    html = pages.page(
        "comparison.html.j2",
        title=comparison.name,
        recommended=recommended,
        findings=findings,
        test=TEST,
        seeds=SEEDS,
        cells=_cells(comparison, shown),
        numbers=[
            (NUMBERS[name].title, NUMBERS[name].about) for name in shown if NUMBERS[name].about
        ],
        sections={"Curves": figures(comparison)},
        each=_runs(comparison, {run.name: run for run in runs}, output),
        beside=about(runs) if 0 < len(runs) <= len(charts.PALETTE) else None,
    )
    write_atomic(output, html)


def _cells(comparison: Comparison, shown: Sequence[str]) -> Table:
    head, rows = comparison.table(shown)
    last = len(comparison.axes) - 1  # the axis that is compared: its labels have colours
    for row, cell in zip(rows, comparison.cells, strict=True):
        row[last] = Named(row[last], colour_of(comparison, cell))
    return head, rows


def _runs(comparison: Comparison, runs: dict[str, RunData], output: Path) -> Table:
    rows: list[list[str | Named]] = []
    for one in (one for cell in comparison.cells for one in cell.runs):
        href = ""
        if one.name in runs and (page := runs[one.name].path / "report.html").is_file():
            href = os.path.relpath(page, output.parent)
        values = [
            f"{one.numbers[key]:{NUMBERS[key].form}}" if key in one.numbers else ""
            for key in NUMBERS
        ]
        rows.append([Named(one.name, href=href), one.state, *values])
    return ["run", "state", *(number.title for number in NUMBERS.values())], rows


def figures(comparison: Comparison) -> list[Panel]:
    """Curves, a chart for each place, and bars; those without data are left out."""
    beside = comparison.beside()
    words = f"{SEEDS}{f'; dashed: {beside.name}' if beside else ''}."
    accuracy = curves(comparison, ACCURACY)
    mismatch = curves(comparison, MISMATCH)
    if accuracy:
        accuracy.update_yaxes(range=charts.UNIT)
    if mismatch:
        mismatch.update_yaxes(type="log", exponentformat="power")
    found = [
        Panel("Held-out accuracy", words, accuracy, wide=True),
        Panel("Mismatch of sampler and learner, k3 KL in nats a token", words, mismatch, wide=True),
        Panel("Effective sample size", words, curves(comparison, SAMPLE_SIZE), wide=True),
        Panel("Area under the accuracy curve", f"{SEEDS}.", bars(comparison, AREA), wide=True),
        Panel("Accuracy in a BF16 engine", f"{SEEDS}.", bars(comparison, IN_BF16), wide=True),
        Panel("Time of a step", f"{SEEDS}.", bars(comparison, "step_s"), wide=True),
    ]
    return [panel for panel in found if panel.figure]


def colour_of(comparison: Comparison, cell: Cell) -> str:
    """Colour of a label, the same in every chart."""
    if cell.labels == comparison.reference:
        return charts.INK
    return charts.colour(comparison.compared.index(cell.labels[-1]))


def curves(comparison: Comparison, metric: str) -> go.Figure | None:
    """A chart for each place that has the metric, side by side."""
    beside = comparison.beside()
    places = {
        " / ".join(place) or comparison.name: cells
        for place, cells in comparison.places().items()
        if any(cell.curve(metric)[1] for cell in cells)
    }
    if not places:
        return None
    rows = math.ceil(len(places) / ABREAST)
    figure = make_subplots(
        rows=rows,
        cols=min(len(places), ABREAST),
        shared_yaxes="all",
        subplot_titles=list(places),
    )
    named: set[str] = set()

    def add(cell: Cell, place: int, name: str, dash: str = "solid") -> None:
        low, mean, high = cell.curve(metric)
        if not mean:
            return
        paint = colour_of(comparison, cell)
        part = {"row": place // ABREAST + 1, "col": place % ABREAST + 1}
        if len(cell.runs) > 1 and dash == "solid":
            charts.add_band(figure, mean.steps, low.values, high.values, paint, **part)
        legend: dict[str, Any] = {"legendgroup": name, "showlegend": name not in named}
        charts.add_line(
            figure, mean.steps, mean.values, paint, dash=dash, name=name, **legend, **part
        )
        named.add(name)

    for place, cells in enumerate(places.values()):
        for cell in cells:
            add(cell, place, cell.labels[-1])
        if beside is not None:
            add(beside, place, beside.name, "dash")
    charts.layout(figure, legend=True)
    return figure.update_layout(height=90 + 250 * rows, margin_t=70, legend_y=1 + 0.1 / rows)


def bars(comparison: Comparison, number: str) -> go.Figure | None:
    """The mean of each cell; the whisker reaches from the lowest seed to the highest."""
    cells = [cell for cell in comparison.cells if cell.by_seed(number)]
    if not cells:
        return None
    figure = go.Figure()
    for cell in cells:
        values = cell.by_seed(number).values()
        mean = statistics.fmean(values)
        figure.add_bar(
            x=[mean],
            y=[cell.name],
            error_x={"array": [max(values) - mean], "arrayminus": [mean - min(values)]},
            orientation="h",
            marker_color=colour_of(comparison, cell),
            hovertemplate="%{x:.3f}",
            name=cell.name,
        )
    charts.layout(figure, x_title=NUMBERS[number].about, hover="closest")
    figure.update_layout(height=90 + 26 * len(cells), bargap=0.35)
    return figure.update_yaxes(autorange="reversed", showgrid=False)
