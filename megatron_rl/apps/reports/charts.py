"""Look of plotly figures, and charts of metrics over steps.

For a single run a colour is a quantity; for several a colour is a run, a dash pattern a quantity.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from megatron_rl.apps.reports.run_data import RunData

INK = "#1f2937"
MUTED = "#6b7280"
LINE = "#d5d9df"
PALETTE = ("#2563eb", "#e8710a", "#12805c", "#7c3aed", "#c8324a", "#0b8aa5", "#9a6b00", "#5b6472")
DASHES = ("solid", "dash", "dot", "dashdot")
UNIT = (-0.02, 1.02)  # the axis of a fraction
CLEAR = "rgba(0,0,0,0)"  # the page's own background, bright or dark
AXIS = {
    "gridcolor": "#eceef1",
    "zeroline": False,
    "linecolor": LINE,
    "tickfont": {"color": MUTED, "size": 11},
    "title": {"font": {"size": 11, "color": MUTED}, "standoff": 8},
}
LOOK = go.layout.Template(
    layout={
        "height": 270,
        "margin": {"l": 58, "r": 14, "t": 30, "b": 38},
        "font": {
            "family": "Inter, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif",
            "size": 12,
            "color": INK,
        },
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "hoverlabel": {"bgcolor": "white"},
        "modebar": {"orientation": "v", "bgcolor": CLEAR},  # beside the legend
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
            "font": {"size": 11, "color": MUTED},
        },
        "xaxis": {
            **AXIS,
            "showgrid": False,
            "showline": True,
            "ticks": "outside",
            "tickcolor": LINE,
            "ticklen": 4,
        },
        "yaxis": {**AXIS, "automargin": True},
    }
)


def colour(number: int) -> str:
    return PALETTE[number % len(PALETTE)]


def layout(
    figure: go.Figure,
    *,
    x_title: str = "step",
    y_title: str = "",
    legend: bool = False,
    hover: str = "x unified",
) -> go.Figure:
    figure.update_layout(template=LOOK, hovermode=hover, showlegend=legend)
    figure.update_xaxes(title_text=x_title)
    return figure.update_yaxes(title_text=y_title)


def add_line(
    figure: go.Figure,
    x: Iterable[float],
    y: Iterable[float],
    colour: str,
    *,
    width: float = 2,
    dash: str = "solid",
    **look: Any,
) -> None:
    """Add a line with a gap where a value is not finite."""
    values = [value if math.isfinite(value) else None for value in y]
    look = {"mode": "lines", "hovertemplate": "%{y:.4g}"} | look
    figure.add_scatter(
        x=x,
        y=values,
        line={"color": colour, "width": width, "dash": dash},
        **look,
    )


def add_band(
    figure: go.Figure,
    x: Sequence[float],
    low: Sequence[float],
    high: Sequence[float],
    colour: str,
    **place: int,
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
        **place,
    )


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred, over the finite values inside the window; shorter at both ends."""
    half = window // 2
    means = []
    for index in range(len(values)):
        inside = values[max(0, index - half) : index + half + 1]
        near = [value for value in inside if math.isfinite(value)]
        means.append(math.fsum(near) / len(near) if near else math.nan)
    return means


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
    """Chart of metrics; `names`: metric -> label.

    `smooth`: the values are a pale line behind their running mean. A metric with a standard error
    has a band.
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
            look: dict[str, Any] = {"dash": DASHES[index % len(DASHES)] if several else "solid"}
            error = run.series(f"{name}_stderr", first_step)
            if error.steps == series.steps and len(values) > 1:
                low, high = (
                    [y + side * e for y, e in zip(values, error.values, strict=True)]
                    for side in (-1, 1)
                )
                add_band(figure, series.steps, low, high, paint)
            window = len(values) // 12
            if smooth and window > 1:
                pale: dict[str, Any] = {"opacity": 0.3, "hoverinfo": "skip", "hovertemplate": None}
                add_line(
                    figure, series.steps, values, paint, width=1, showlegend=False, **pale, **look
                )
                values = running_mean(values, window)
            if markers or len(values) == 1:
                look |= {"mode": "lines+markers", "marker": {"size": 6}}
            title = label
            if several:
                title = f"{run.name}: {label}" if len(names) > 1 else run.name
            add_line(figure, series.steps, values, paint, name=title, **look)
    if not figure.data:
        return None
    shown = sum(trace.showlegend is not False for trace in figure.data)
    layout(figure, y_title=y_title, legend=not several and shown > 1)
    if y_range:
        figure.update_yaxes(range=list(y_range))
    elif from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure
