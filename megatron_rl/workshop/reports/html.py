"""What pages of reports are put together from: the document, tables, figures under their titles, names in colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from megatron_rl.workshop.reports.figures import PALETTE
from megatron_rl.workshop.reports.sections import Panel

STYLE = Path(__file__).with_name("report.css")


def document(title: str, body: str) -> str:
    """Self-contained: it opens without a network."""
    return (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{escape(title)}: report</title>\n"
        f"<meta name=viewport content='width=device-width'><style>{STYLE.read_text(encoding='utf-8')}</style>\n"
        f"<script>{get_plotlyjs()}</script></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(heading: str, panels: Sequence[Panel]) -> str:
    return f"<h2>{heading}</h2>\n<div class=grid>{''.join(map(_draw, panels))}</div>"


def _draw(panel: Panel) -> str:
    assert panel.figure is not None
    options: Mapping[str, Any] = {"displayModeBar": False, "responsive": True}
    plot = panel.figure.to_html(full_html=False, include_plotlyjs=False, config=options)
    return (
        f"<figure{' class=wide' if panel.wide else ''}><figcaption><b>{escape(panel.title)}</b>"
        f"<span>{escape(panel.about)}</span></figcaption>{plot}</figure>"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], style: str = "table") -> str:
    header = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='{style}'><table><thead><tr>{header}</tr></thead><tbody>{body}</tbody></table></div>"


def chip(name: str, colour: str) -> str:
    return f"<span class=chip><i style='background:{colour}'></i>{escape(name)}</span>"


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]
