"""Writes a comparison's table, findings and figure (SVG) between markers in Markdown pages, and its
numbers as JSON.

    <!-- NAME: table -->
    ...
    <!-- /NAME -->

NAME is the comparison's; beside `table` there are `findings` and `figure`. A test makes them again
from the JSON.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.config import ConfigError
from megatron_rl.files import write_whole
from megatron_rl.runs.metrics_file import ACCURACY, NUMBERS
from megatron_rl.workshop.comparison.comparison import Cell, Comparison
from megatron_rl.workshop.comparison.findings import TEST, said
from megatron_rl.workshop.comparison.page import colour_of
from megatron_rl.workshop.reports.charts import INK
from megatron_rl.workshop.reports.svg import LEFT, Plot, legend, nice_ticks, panels_picture

BLOCKS = ("table", "findings", "figure")
SHOWN = ("accuracy_area", "accuracy", "abs_difference", "k3_kl", "sample_size", "step_s")


def write_docs(comparison: Comparison, pages: list[Path], folder: Path) -> list[Path]:
    """The blocks of these pages, the figure and the numbers; returns what was written."""
    stored = comparison.as_json()
    comparison = Comparison.from_json(stored)  # numbers as they are stored: rounded
    texts = {
        page: with_blocks(page.read_text(encoding="utf-8"), comparison, page, folder)
        for page in pages
    }
    texts[folder / f"{comparison.name}.svg"] = comparison_svg(comparison)
    texts[folder / f"{comparison.name}.json"] = json.dumps(stored, indent=1) + "\n"
    for path, text in texts.items():
        write_whole(path, text)
    return list(texts)


def check_pages(pages: Iterable[Path], name: str) -> None:
    """Find out before the runs what would keep their results from being written."""
    for page in pages:
        if not page.is_file():
            raise ConfigError(f"--write-docs {page}: no such page")
        _check_blocks(page.read_text(encoding="utf-8"), name, page)


def stored(path: Path) -> Comparison:
    return Comparison.from_json(json.loads(path.read_text(encoding="utf-8")))


def with_blocks(text: str, comparison: Comparison, page: Path, folder: Path) -> str:
    """The page with each of its blocks written anew."""
    caption = f"{comparison.name}: held-out accuracy over training, mean and reach of the seeds"
    figure = f"![{caption}]({os.path.relpath(folder, page.parent)}/{comparison.name}.svg)"
    blocks = {
        "table": _table(comparison),
        "findings": "\n".join([*(f"- {one}" for one in said(comparison)), "", TEST]),
        "figure": figure.replace("(./", "("),
    }
    _check_blocks(text, comparison.name, page)
    return _found(comparison.name).sub(
        lambda match: f"{match[1]}{blocks[match[2]]}\n{match[3]}", text
    )


def _found(name: str) -> re.Pattern[str]:
    name = re.escape(name)
    return re.compile(rf"(<!-- {name}: (\w+) -->\n).*?(<!-- /{name} -->)", re.S)


def _check_blocks(text: str, name: str, page: Path) -> None:
    kinds = [match[2] for match in _found(name).finditer(text)]
    if not kinds or (wrong := [kind for kind in kinds if kind not in BLOCKS]):
        if kinds:
            what = f"a block of kind {wrong[0]}"
        else:
            what = f"no block such as <!-- {name}: table -->"
        raise ConfigError(
            f"{page}: {what}, expected {', '.join(BLOCKS)}, closed by <!-- /{name} -->"
        )


def _table(comparison: Comparison) -> str:
    shown = comparison.held(SHOWN)
    head, rows = comparison.table(shown)
    about = "; ".join(f"*{NUMBERS[name].title}*: {NUMBERS[name].about}" for name in shown)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(
        [*lines, "", f"Means over seeds, and from the lowest to the highest. {about}."]
    )


def comparison_svg(comparison: Comparison) -> str:
    """A panel for each place: the mean of the seeds, in a band from the lowest to the highest."""
    beside = comparison.beside()
    drawn = [
        (place, cells)
        for place, cells in comparison.places().items()
        if any(cell.curve(ACCURACY)[1] for cell in cells)
    ]
    ranges = [cell.curve(ACCURACY) for _, cells in drawn for cell in cells]
    if beside is not None:
        ranges.append(beside.curve(ACCURACY))
    heights = [value for low, _, high in ranges for value in (*low.values, *high.values)] or [
        0.0,
        1.0,
    ]
    lengths = [step for _, mean, _ in ranges for step in mean.steps] or [0, 1]
    ticks = nice_ticks(min(heights), max(heights))
    steps = (min(lengths), max(max(lengths), min(lengths) + 1))
    names = {cell.labels[-1]: colour_of(comparison, cell) for _, cells in drawn for cell in cells}
    entries = [*names.items(), *([(beside.name, INK)] if beside else [])]
    parts = list(legend(LEFT, entries))
    for number, (place, cells) in enumerate(drawn):
        plot = Plot.number(number, steps, ticks)
        parts += plot.frame(f"{' / '.join(place) or comparison.name}: held-out accuracy")
        parts += _lines(comparison, plot, cells, beside)
    return panels_picture(len(drawn), parts)


def _lines(
    comparison: Comparison, plot: Plot, cells: list[Cell], beside: Cell | None
) -> Iterable[str]:
    for cell in cells:
        low, mean, high = cell.curve(ACCURACY)
        if mean:
            yield plot.band(low, high, colour_of(comparison, cell))
            yield plot.line(mean, colour_of(comparison, cell))
    if beside is not None and (mean := beside.curve(ACCURACY)[1]):
        yield plot.line(mean, INK, ' stroke-dasharray="5 4"')
