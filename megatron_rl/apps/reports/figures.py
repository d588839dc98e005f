"""Plotly figures of runs (groups, ratios, mismatch, times, lanes); None if no run has the data."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from megatron_rl.apps.reports.charts import PALETTE, add_line, colour, layout
from megatron_rl.apps.reports.run_data import ROWS, RunData
from megatron_rl.rollout_correction.breakdown import Slice, pooled

TIME_PHASES = {
    "rollout": "#2563eb",
    "prox": "#8b5cf6",
    "correction": "#c4b5fd",
    "update": "#e8710a",
    "sync": "#12805c",
    "eval": "#d9a514",
    "record": "#b98a94",
    "other": "#c3c8d0",
}
SYNC_PHASES = {
    "plan_s": "#c3c8d0",
    "quantize_s": "#8b5cf6",
    "gather_s": "#2563eb",
    "transfer_s": "#12805c",
    "load_s": "#e8710a",
}
LANE_COLOURS = TIME_PHASES | {
    "sampler": "#2563eb",
    "rewards": "#0b8aa5",
    "rollout": "#e3e7ee",
    "checkpoint": "#5b6472",
}
LANE_NAMES = {"rollout": "waits for responses"}
REACH = 8.0  # of the histogram of ratios, in nats


def difficulty(runs: Sequence[RunData]) -> go.Figure | None:
    """Shares of groups, stacked; of several runs only those with correct and wrong responses."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        names = ("groups", "groups_all_right", "groups_all_wrong")
        counts = [run.series(f"rollout/{name}") for name in names]
        if not all(one.values for one in counts):
            continue
        groups, right, wrong = (np.asarray(one.values) for one in counts)
        steps = counts[0].steps
        some = 1 - (right + wrong) / groups
        if len(runs) > 1:
            add_line(figure, steps, some, colour(number), name=run.name)
            continue
        for name, share, paint in (
            ("all right", right / groups, "#12805c"),
            ("some", some, "#2563eb"),
            ("all wrong", wrong / groups, "#c3c8d0"),
        ):
            add_line(figure, steps, share, paint, width=0.5, name=name, stackgroup="one")
    if not figure.data:
        return None
    return layout(figure, legend=len(runs) == 1).update_yaxes(range=[0, 1])


def ratio_histogram(runs: Sequence[RunData]) -> go.Figure | None:
    """rho of the recorded tokens, the applied weights, and the bounds as dashed lines."""
    found = [(number, run, run.tokens) for number, run in enumerate(runs) if run.tokens]
    if not found:
        return None
    counts = [len(tokens.log_ratio) for _, _, tokens in found]
    bounds = {bound for _, run, _ in found for bound in weight_bounds(run)}
    widest = [float(np.quantile(np.abs(one.log_ratio), 0.9995)) for _, _, one in found]
    reach = min(1.1 * max(0.05, *widest, *(abs(math.log(bound)) for bound in bounds)), REACH)
    edges = np.linspace(-reach, reach, 82 if min(counts) > 5000 else 42)
    floor = 0.5 / max(counts)
    figure = go.Figure()

    def add(log_values: np.ndarray, title: str, paint: str, width: float) -> None:
        share = np.histogram(np.clip(log_values, -reach, reach), edges)[0] / len(log_values)
        figure.add_scatter(
            x=np.exp((edges[:-1] + edges[1:]) / 2),
            y=np.maximum(share, floor),  # a log axis has no zero
            line={"color": paint, "width": width, "shape": "hvh"},
            mode="lines",
            name=title,
            hovertemplate="%{y:.3%}",
        )

    for number, run, tokens in found:
        applied = tokens.weights[np.isfinite(tokens.weights) & (tokens.weights > 0)]
        if len(runs) == 1 and len(applied):
            add(np.log(applied), "applied weight", "#f6b77f", 5)
        add(tokens.log_ratio, run.name if len(runs) > 1 else "rho", colour(number), 1.6)
    for bound in sorted(bounds):
        figure.add_vline(x=bound, line={"color": PALETTE[4], "width": 1.2, "dash": "dash"})
    layout(figure, x_title="ratio", y_title="share of tokens", legend=len(runs) == 1)
    figure.update_xaxes(type="log")
    return figure.update_yaxes(type="log", exponentformat="power", dtick=1)


def weight_bounds(run: RunData) -> list[float]:
    """Bounds that clamp a token's ratio; empty for sequence weights, which clamp another ratio."""
    if run.setting("correction.weight.level", "none") != "token":
        return []
    bounds = [run.setting(f"correction.weight.{side}") for side in ("low", "high")]
    return [bound for bound in bounds if isinstance(bound, int | float) and bound > 0]


def mismatch_by(runs: Sequence[RunData], by: str, x_title: str) -> go.Figure | None:
    """Mean absolute logprob difference of recorded tokens along one cut; None for one value."""
    parts = [{part.label: part for part in run.mismatch if part.by == by} for run in runs]
    labels = [part.label for part in pooled(part for found in parts for part in found.values())]
    if len(labels) < 2:
        return None
    figure = go.Figure()
    for number, (run, found) in enumerate(zip(runs, parts, strict=True)):
        held = [label for label in labels if label in found]
        figure.add_bar(
            x=[label.removesuffix(" %") for label in held],
            y=[found[label].abs_diff for label in held],
            customdata=[_hover(found[label]) for label in held],
            hovertemplate="%{y:.4f} (%{customdata})",
            marker_color=colour(number),
            name=run.name,
        )
    layout(figure, x_title=x_title, y_title="mean |difference|, nats").update_layout(bargap=0.35)
    order = [label.removesuffix(" %") for label in labels]
    return figure.update_xaxes(type="category", categoryorder="array", categoryarray=order)


def _hover(part: Slice) -> str:
    tokens = f"{part.tokens:,} tokens"
    if not part.top_tokens:
        return tokens
    return f"{tokens}; KL over top tokens {part.top_kl:.1e}, TV {part.top_tv:.1e}"


def split(runs: Sequence[RunData], group: str, phases: Mapping[str, str]) -> go.Figure | None:
    """Seconds per step by phase, stacked, for a single run; for several the mean step of each."""
    figure = go.Figure()
    several = len(runs) > 1
    for phase, paint in phases.items():
        series = [run.series(f"{group}/{phase}", 1) for run in runs]
        if not any(one.finite for one in series):
            continue
        look = {"marker_color": paint, "name": phase.removesuffix("_s")}
        if several:
            means = [run.total(f"{group}/{phase}", 1) / max(1, run.steps) for run in runs]
            names = [run.name for run in runs]
            figure.add_bar(x=means, y=names, orientation="h", hovertemplate="%{x:.3f} s", **look)
        else:
            seconds = [value if math.isfinite(value) else None for value in series[0].values]
            figure.add_bar(x=series[0].steps, y=seconds, hovertemplate="%{y:.3f} s", **look)
    if not figure.data:
        return None
    figure.update_layout(barmode="stack", bargap=0.4 if several else 0.08)
    if several:
        layout(figure, x_title="seconds per step, mean", legend=True, hover="closest")
        return figure.update_yaxes(autorange="reversed", showgrid=False)
    return layout(figure, y_title="seconds", legend=True)


def lanes(runs: Sequence[RunData]) -> go.Figure | None:
    """Spans of work in a few steps of a run; pale while the learner waits for responses."""
    spans = runs[0].lanes if len(runs) == 1 else []
    if not any(one.lane == "sampler" for one in spans):
        return None
    figure = go.Figure()
    for row, lane in ((row, lane) for row, lanes in ROWS.items() for lane in lanes):
        if mine := [one for one in spans if one.lane == lane]:
            figure.add_bar(
                x=[one.end - one.begin for one in mine],
                y=[row] * len(mine),
                base=[one.begin for one in mine],
                customdata=[one.step for one in mine],
                hovertemplate="step %{customdata}: %{x:.3f} s",
                orientation="h",
                marker={"color": LANE_COLOURS[lane], "line": {"width": 0}},
                name=LANE_NAMES.get(lane, lane),
            )
    layout(figure, x_title="seconds", legend=True, hover="closest")
    figure.update_layout(barmode="overlay", bargap=0.35)
    return figure.update_yaxes(
        categoryorder="array", categoryarray=list(ROWS), autorange="reversed", showgrid=False
    )
