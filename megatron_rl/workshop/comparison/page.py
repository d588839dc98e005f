"""The page of a comparison: what it says, its cells in a table, their curves, and its runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from megatron_rl.files import write_whole
from megatron_rl.runs.metrics_file import ACCURACY, AREA, MISMATCH, NUMBERS, SAMPLE_SIZE
from megatron_rl.workshop.comparison.comparison import Comparison
from megatron_rl.workshop.comparison.figures import bars, colour_of, panels
from megatron_rl.workshop.comparison.findings import TEST, said
from megatron_rl.workshop.reports.figures import PALETTE
from megatron_rl.workshop.reports.html import chip, document, section, table
from megatron_rl.workshop.reports.report import body
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
