"""HTML pages from Jinja templates, which escape every text that they are given, with plotly figures and table cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

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


def page(template: str, **data: Any) -> str:
    return TEMPLATES.get_template(template).render(**data)


def plot(figure: go.Figure) -> Markup:
    options = {"displayModeBar": False, "responsive": True}
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=options))


TEMPLATES.globals.update(plot=plot, plotly=lambda: Markup(get_plotlyjs()))
