"""Chart helpers for HTML pages: plotly figures of one look, made of lines, bands, bars, and curves
of runs' metrics.

One run: a colour is a quantity. Several: a colour is a run, and a dash pattern tells quantities
apart.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from megatron_rl.runs.metrics_file import Series
from megatron_rl.workshop.reports.run_data import RunData

INK = "#1f2937"
MUTED = "#6b7280"
GRID = "#eceef1"
PALETTE = ("#2563eb", "#e8710a", "#12805c", "#7c3aed", "#c8324a", "#0b8aa5", "#9a6b00", "#5b6472")
DASHES = ("solid", "dash", "dot", "dashdot")
CLEAR = "rgba(0,0,0,0)"  # the page's own ground, bright or dark
FONT = "Inter, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
HEIGHT = 270
UNIT = (-0.02, 1.02)  # the axis of a fraction


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def layout(
    figure: go.Figure, *, y_title: str = "", legend: bool = False, hover: str = "x unified"
) -> go.Figure:
    figure.update_layout(
        template="none",
        height=HEIGHT,
        margin={"l": 58, "r": 14, "t": 30 if legend else 10, "b": 38},
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor=CLEAR,
        plot_bgcolor=CLEAR,
        hoverlabel={"bgcolor": "white"},
        hovermode=hover,
        showlegend=legend,
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 11, "color": MUTED},
        },
    )
    axis = {
        "gridcolor": GRID,
        "zeroline": False,
        "linecolor": "#d5d9df",
        "tickfont": {"color": MUTED, "size": 11},
    }
    title = {"font": {"size": 11, "color": MUTED}, "standoff": 8}
    figure.update_xaxes(
        **axis, showgrid=False, showline=True, ticks="outside", tickcolor="#d5d9df", ticklen=4
    )
    figure.update_yaxes(**axis, title={**title, "text": y_title}, automargin=True)
    if not figure.layout.xaxis.title.text:
        figure.update_xaxes(title={**title, "text": "step"})
    return figure


def add_line(
    figure: go.Figure,
    x: Iterable[float],
    y: Iterable[float],
    colour: str,
    *,
    width: float = 2,
    dash: str = "solid",
    mode: str = "lines",
    hovertemplate: str = "%{y:.4g}",
    **look: Any,
) -> None:
    """A line with a gap where a value is not finite."""
    values = [value if math.isfinite(value) else None for value in y]
    line = {"color": colour, "width": width, "dash": dash, "shape": look.pop("shape", None)}
    figure.add_scatter(x=x, y=values, mode=mode, line=line, hovertemplate=hovertemplate, **look)


def add_band(
    figure: go.Figure, x: Sequence[float], low: Sequence[float], high: Sequence[float], colour: str
) -> None:
    figure.add_scatter(
        x=[*x, *reversed(x)],
        y=[*high, *reversed(low)],
        fill="toself",
        fillcolor=colour,
        opacity=0.15,
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )


def add_bars(
    figure: go.Figure, x: Any, y: Any, colour: Any, hovertemplate: str, **look: Any
) -> None:
    """Bars; they lie where the look says `orientation="h"`."""
    figure.add_bar(
        x=x,
        y=y,
        marker={"color": colour, **look.pop("marker", {})},
        hovertemplate=hovertemplate,
        **look,
    )


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred, over the finite values inside the window; shorter at both ends."""
    half = window // 2
    means = []
    for index in range(len(values)):
        near = [
            value
            for value in values[max(0, index - half) : index + half + 1]
            if math.isfinite(value)
        ]
        means.append(math.fsum(near) / len(near) if near else math.nan)
    return means


def smooth_window(series: Series) -> int:
    return max(1, len(series.values) // 12)


def curves(
    runs: Sequence[RunData],
    names: Mapping[str, str],
    *,
    y_title: str = "",
    smooth: bool = False,
    markers: bool = False,
    first_step: int = 0,
    scale: float = 1.0,
    from_zero: bool = False,
    y_range: tuple[float, float] | None = None,
) -> go.Figure | None:
    """`names`: metric -> label. With `smooth`, the values themselves are a pale line behind their
    running mean.
    """
    figure = go.Figure()
    several = len(runs) > 1
    for number, run in enumerate(runs):
        for index, (name, label) in enumerate(names.items()):
            series = run.series(name, first_step)
            if not series:
                continue
            values = [value * scale for value in series.values]
            paint = colour(number if several else index)
            dash = DASHES[index % len(DASHES)] if several else "solid"
            if several:
                title = f"{run.name}: {label}" if len(names) > 1 else run.name
            else:
                title = label
            if smooth and (window := smooth_window(series)) > 1:
                pale: dict[str, Any] = {
                    "opacity": 0.3,
                    "hoverinfo": "skip",
                    "showlegend": False,
                    "hovertemplate": None,
                }
                add_line(figure, series.steps, values, paint, width=1, dash=dash, **pale)
                values = running_mean(values, window)
            mode = "lines+markers" if markers or len(series.steps) == 1 else "lines"
            more: dict[str, Any] = {"name": title, "mode": mode, "marker": {"size": 6}}
            add_line(figure, series.steps, values, paint, dash=dash, **more)
    if not figure.data:
        return None
    shown = sum(trace.showlegend is not False for trace in figure.data)
    layout(figure, y_title=y_title, legend=not several and shown > 1)
    if y_range:
        figure.update_yaxes(range=list(y_range))
    elif from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure
