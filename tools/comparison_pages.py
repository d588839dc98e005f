"""Writes a comparison's table, findings and link to a figure between markers in Markdown pages, and
its numbers as JSON.

    <!-- NAME: table -->
    ...
    <!-- /NAME -->

NAME is the comparison's; beside `table` there are `findings` and `figure`. A test makes them again
from the JSON. The figure, NAME.svg, is saved from the comparison's page by its camera button.
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_rl.apps.comparison.comparison import Comparison
from megatron_rl.apps.comparison.findings import summary
from megatron_rl.config import ConfigError
from megatron_rl.files import write_atomic
from megatron_rl.tracking.metrics_file import NUMBERS

BLOCKS = ("table", "findings", "figure")
SHOWN = (
    "accuracy_area",
    "accuracy",
    "accuracy_bf16",
    "abs_difference",
    "k3_kl",
    "sample_size",
    "step_s",
)


def write_docs(
    comparison: Comparison, pages: list[Path], figures: Path, results: Path
) -> list[Path]:
    """Write the blocks of these pages, and the numbers into `results`; return the files."""
    stored = comparison.as_json()
    comparison = Comparison.from_json(stored)  # numbers as they are stored: rounded
    texts = {
        page: with_blocks(page.read_text(encoding="utf-8"), comparison, page, figures)
        for page in pages
    }
    texts[results / f"{comparison.name}.json"] = json.dumps(stored, indent=1) + "\n"
    for path, text in texts.items():
        write_atomic(path, text)
    return list(texts)


def check_pages(pages: Iterable[Path], name: str) -> None:
    """Refuse, before the runs, pages that their results could not be written into."""
    for page in pages:
        if not page.is_file():
            raise ConfigError(f"--write-docs {page}: no such page")
        _check_blocks(page.read_text(encoding="utf-8"), name, page)


def stored(path: Path) -> Comparison:
    return Comparison.from_json(json.loads(path.read_text(encoding="utf-8")))


def with_blocks(text: str, comparison: Comparison, page: Path, figures: Path) -> str:
    """Return the page with each of its blocks written anew."""
    caption = f"{comparison.name}: held-out accuracy over training, mean and min-max over seeds"
    figure = f"![{caption}]({os.path.relpath(figures, page.parent)}/{comparison.name}.svg)"
    blocks = {
        "table": _table(comparison),
        "findings": "\n".join(f"- {one}" for one in summary(comparison)),
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
    if not kinds or not {*kinds} <= {*BLOCKS}:
        raise ConfigError(
            f"{page}: blocks of {name}: {', '.join(kinds) or 'none'}; expected {', '.join(BLOCKS)}, "
            f"such as <!-- {name}: table -->, closed by <!-- /{name} -->"
        )


def _table(comparison: Comparison) -> str:
    shown = comparison.held(SHOWN)
    head, rows = comparison.table(shown)
    about = "; ".join(f"*{NUMBERS[name].title}*: {NUMBERS[name].about}" for name in shown)
    lines = [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([*lines, "", f"Mean and min-max over seeds. {about}."])
