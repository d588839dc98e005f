"""HTML page of tools/compare_corrections.py: a comparison's findings, cells, curves and runs; W&B
gets its figures.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from megatron_rl.files import write_whole
from megatron_rl.runs.metrics_file import ACCURACY, AREA, MISMATCH, NUMBERS, SAMPLE_SIZE
from megatron_rl.workshop.comparison.comparison import Cell, Comparison
from megatron_rl.workshop.comparison.findings import TEST, said
from megatron_rl.workshop.reports import pages
from megatron_rl.workshop.reports.charts import (
    INK,
    PALETTE,
    UNIT,
    add_band,
    add_bars,
    add_line,
    colour,
    layout,
)
from megatron_rl.workshop.reports.pages import Named
from megatron_rl.workshop.reports.report import about
from megatron_rl.workshop.reports.run_data import RunData
from megatron_rl.workshop.reports.sections import Panel

SEEDS = "mean of the seeds, and from the lowest to the highest"
Table = tuple[list[str], list[list[str | Named]]]


def write_comparison(comparison: Comparison, runs: Sequence[RunData], output: Path) -> None:
    """`runs`: those of its cells that can be read. A few are shown beside each other too, as any
    runs are.
    """
    shown = comparison.held(NUMBERS)
    recommended, *findings = said(comparison)
    html = pages.page(
        "comparison.html.j2",
        output,
        title=comparison.name,
        recommended=recommended,
        findings=findings,
        test=TEST,
        seeds=SEEDS,
        cells=_cells(comparison, shown),
        numbers=[
            (NUMBERS[name].title, NUMBERS[name].about) for name in shown if NUMBERS[name].about
        ],
        sections={heading: found for heading, found in _figures(comparison).items() if found},
        each=_runs(comparison, {run.name: run for run in runs}, output),
        beside=about(runs) if 0 < len(runs) <= len(PALETTE) else None,
    )
    write_whole(output, html)


def _cells(comparison: Comparison, shown: Sequence[str]) -> Table:
    head, rows = comparison.table(shown)
    last = len(comparison.axes) - 1  # the axis that is compared: its labels have colours
    paints = [colour_of(comparison, cell) for cell in comparison.cells]
    return head, [
        [*row[:last], Named(row[last], paint), *row[last + 1 :]]
        for row, paint in zip(rows, paints, strict=True)
    ]


def _runs(comparison: Comparison, runs: dict[str, RunData], output: Path) -> Table:
    rows: list[list[str | Named]] = []
    for one in (one for cell in comparison.cells for one in cell.results):
        run = runs.get(one.name)
        page = run.path / "report.html" if run else None
        if page is not None and page.is_file():
            href = os.path.relpath(page, output.parent)
        else:
            href = ""
        values = [
            f"{one.numbers[key]:{NUMBERS[key].form}}" if key in one.numbers else ""
            for key in NUMBERS
        ]
        rows.append([Named(one.name, href=href), one.state, *values])
    return ["run", "state", *(number.title for number in NUMBERS.values())], rows


def _figures(comparison: Comparison) -> dict[str, list[Panel]]:
    beside = comparison.beside()
    words = f"{SEEDS.capitalize()}{f'; dashed: {beside.name}' if beside else ''}."
    return {
        "Held-out accuracy": panels(comparison, ACCURACY, words, y_range=UNIT),
        "Mismatch of sampler and learner, k3 KL in nats a token": panels(
            comparison, MISMATCH, words, log=True
        ),
        "Effective sample size": panels(comparison, SAMPLE_SIZE, words),
        "What it comes to": [
            Panel(title, f"{SEEDS.capitalize()}.", figure, wide=True)
            for name, title in (
                (AREA, "Area under the accuracy curve"),
                ("step_s", "Time of a step"),
            )
            if (figure := bars(comparison, name))
        ],
    }


def colour_of(comparison: Comparison, cell: Cell) -> str:
    """A label's colour, the same wherever it is drawn."""
    if cell.labels == comparison.reference:
        return INK
    return colour(comparison.compared.index(cell.labels[-1]))


def panels(
    comparison: Comparison,
    metric: str,
    about: str,
    *,
    log: bool = False,
    y_range: tuple[float, float] | None = None,
) -> list[Panel]:
    """One for each place, those of several without anything to draw left out."""
    found = []
    for place, cells in comparison.places().items():
        if figure := _curves(comparison, cells, metric):
            if log:
                figure.update_yaxes(type="log", exponentformat="power")
            if y_range:
                figure.update_yaxes(range=list(y_range))
            found.append(Panel(" / ".join(place) or comparison.name, about, figure))
    return found


def _curves(comparison: Comparison, cells: list[Cell], metric: str) -> go.Figure | None:
    figure = go.Figure()
    for cell in cells:
        low, mean, high = cell.curve(metric)
        if mean:
            paint = colour_of(comparison, cell)
            if len(cell.results) > 1:
                add_band(figure, mean.steps, low.values, high.values, paint)
            add_line(figure, mean.steps, mean.values, paint, name=cell.labels[-1])
    if not figure.data:
        return None
    beside = comparison.beside()
    if beside is not None and (mean := beside.curve(metric)[1]):
        add_line(figure, mean.steps, mean.values, INK, dash="dash", name=beside.name)
    return layout(figure, legend=True)


def bars(comparison: Comparison, number: str) -> go.Figure | None:
    """The mean of each cell; the whisker reaches from the lowest seed to the highest."""
    cells = [cell for cell in comparison.cells if cell.by_seed(number)]
    if not cells:
        return None
    values = [list(cell.by_seed(number).values()) for cell in cells]
    means = [sum(one) / len(one) for one in values]
    whiskers = {
        "array": [max(one) - mean for one, mean in zip(values, means, strict=True)],
        "arrayminus": [mean - min(one) for one, mean in zip(values, means, strict=True)],
    }
    figure = go.Figure()
    paint = [colour_of(comparison, cell) for cell in cells]
    names = [cell.name for cell in cells]
    error = {"type": "data", "symmetric": False, "thickness": 1.2, **whiskers}
    add_bars(figure, means, names, paint, "%{x:.3f}", orientation="h", error_x=error)
    layout(figure, hover="closest").update_layout(height=90 + 26 * len(cells), bargap=0.35)
    figure.update_xaxes(title={"text": NUMBERS[number].about})
    return figure.update_yaxes(autorange="reversed", showgrid=False)
