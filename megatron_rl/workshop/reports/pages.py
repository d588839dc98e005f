"""HTML pages from Jinja templates, which escape every text that they are given, with plotly figures
and table cells.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs, get_plotlyjs_version

from megatron_rl.files import write_whole
from megatron_rl.workshop.reports.charts import INK

FROM_FILE = Markup(
    "<script src='{}' onerror='document.documentElement.className=`no-figures`'></script>"
)
LIBRARY = f"plotly-{get_plotlyjs_version()}.min.js"
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Named(NamedTuple):
    """A cell of a table that is more than text."""

    name: str
    colour: str = ""  # drawn before the name
    href: str = ""


def page(template: str, output: Path | None = None, **data: Any) -> str:
    """`output`: where the page is to lie, among other pages that share plotly's library."""
    inked = "rgb({}, {}, {})".format(*bytes.fromhex(INK[1:]))  # as a browser spells it
    data |= {"plotly": library(output), "plotly_file": LIBRARY, "ink": inked}
    return TEMPLATES.get_template(template).render(**data)


def library(output: Path | None) -> Markup:
    """plotly's library (5 MB): in the page, or once in a folder of runs where more than one report
    lies.
    """
    place = shared_place(output) if output else None
    if output and place:
        try:
            if not place.is_file():
                write_whole(place, get_plotlyjs())
            return FROM_FILE.format(os.path.relpath(place, output.parent))
        except OSError:  # a folder that others own: the page holds all it needs
            pass
    return Markup(f"<script>{get_plotlyjs()}</script>")


def shared_place(output: Path) -> Path | None:
    """Beside the folders of runs, for a run's own report or a page about several runs; None where
    it lies elsewhere.
    """
    own = output.name == "report.html"
    runs = output.parent.parent if own else output.parent
    others = [one for one in runs.glob("*/report.html") if not own or one.parent != output.parent]
    return runs / LIBRARY if others else None


def plot(figure: go.Figure) -> Markup:
    options = {"displayModeBar": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=options))


TEMPLATES.globals.update(plot=plot)
