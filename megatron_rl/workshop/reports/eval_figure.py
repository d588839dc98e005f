"""The accuracy on every evaluated set, each with its standard error as a band."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from megatron_rl.runs.metrics import accuracies
from megatron_rl.workshop.reports.figures import curves
from megatron_rl.workshop.reports.run_data import RunData

UNIT = (-0.02, 1.02)
BAND = 0.15  # opacity


def accuracy(runs: Sequence[RunData]) -> go.Figure | None:
    sets = accuracies({name: None for run in runs for line in run.lines for name in line})
    labels = {name: "accuracy" if label == "eval" else label for name, label in sets.items()}
    figure = curves(runs, labels, markers=True, y_range=UNIT) if labels else None
    if figure is None:
        return None
    drawn = [(run, name) for run in runs for name in sets if run.series(name)]  # in the order of `curves`
    for (run, name), line in zip(drawn, list(figure.data), strict=True):
        values, errors = run.series(name), run.series(f"{name}_stderr")
        around = dict(zip(errors.steps, errors.values, strict=True))
        band = [(x, y, around[x]) for x, y in zip(values.steps, values.values, strict=True) if x in around]
        if len(band) > 1:
            outline = [(x, y + e) for x, y, e in band] + [(x, y - e) for x, y, e in reversed(band)]
            figure.add_scatter(
                x=[x for x, _ in outline],
                y=[y for _, y in outline],
                fill="toself",
                fillcolor=line.line.color,
                opacity=BAND,
                line={"width": 0},
                mode="lines",
                hoverinfo="skip",
                showlegend=False,
            )
    return figure
