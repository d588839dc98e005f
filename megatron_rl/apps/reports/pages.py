"""HTML pages from Jinja templates, which escape every text that they are given, with plotly figures
and table cells.
"""

from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from megatron_rl.apps.reports.charts import INK

# buttons appear where the pointer is; the camera saves a figure for a document
PLOTLY = {
    "displaylogo": False,
    "responsive": True,
    "toImageButtonOptions": {"format": "svg"},
}
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


class Named(NamedTuple):
    """Cell of a table with a name and a colour or a link."""

    name: str
    colour: str = ""  # drawn before the name
    href: str = ""


Table = tuple[list[str], list[list[str | Named]]]


def page(template: str, **data: Any) -> str:
    """The page, with plotly's library (5 MB) in it: it needs no other file and no network."""
    inked = "rgb({}, {}, {})".format(*bytes.fromhex(INK[1:]))  # as a browser spells it
    library = Markup(f"<script>{get_plotlyjs()}</script>")
    return TEMPLATES.get_template(template).render(**data, plotly=library, ink=inked)


def plot(figure: go.Figure) -> Markup:
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=PLOTLY))


TEMPLATES.globals.update(plot=plot)
