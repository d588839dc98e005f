"""The page of `megatron-rl mismatch`: one figure, which opens without a network."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from megatron_rl.workshop.reports.figures import PALETTE, layout

LEAST = 1e-12  # what a logarithmic axis shows of zero


def page(result: Mapping[str, Any]) -> str:
    return str(figure(result).to_html(include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}))


def figure(result: Mapping[str, Any]) -> go.Figure:
    """Over the points in order: what each adds to the KL, what it adds to the values, and how far both are apart."""
    points = result["points"]
    names = [point["point"] for point in points]
    titles = ("KL that enters, nats a token", "mean |difference| of the values")
    drawn = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=titles)
    drawn.add_bar(
        x=names,
        y=[point["kl_enters"] for point in points],
        customdata=[point["share"] for point in points],
        hovertemplate="%{y:.3g} (%{customdata:.1%})",
        marker={"color": PALETTE[1]},
        showlegend=False,
        name="enters",
    )
    for side, label, colour in (("apart", "each by itself", PALETTE[0]), ("own", "from equal inputs", PALETTE[1])):
        means = [max(point[side]["mean"], LEAST) for point in points]
        line = {"color": colour, "width": 1.5}
        drawn.add_scatter(
            x=names, y=means, name=label, mode="lines+markers", line=line, hovertemplate="%{y:.3g}", row=2, col=1
        )
    layout(drawn, legend=True)
    drawn.update_layout(height=760, margin={"t": 90, "b": 140}, title={"text": _title(result), "font": {"size": 15}})
    drawn.update_xaxes(title={"text": ""}, tickangle=-60)
    drawn.update_yaxes(type="log", exponentformat="power", row=2, col=1)
    return drawn


def _title(result: Mapping[str, Any]) -> str:
    format = "BF16" if result["format"] == "none" else result["format"].upper()
    return (
        f"{result['model']}: sampler {format}, learner {result['precision']} ({result['forward']}); KL "
        f"{result['kl']:.3g} nats a token, mean |d| {result['d']['mean_abs']:.2g}, {result['tokens']} tokens"
    )
