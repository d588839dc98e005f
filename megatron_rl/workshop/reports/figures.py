"""The report's figures. Each takes the runs and returns a plotly figure, or None where no run has the data.

One run: a colour is a quantity. Several: a colour is a run, and a dash pattern tells quantities apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from megatron_rl.rollout_correction.breakdown import pooled
from megatron_rl.runs.metrics_file import Series
from megatron_rl.workshop.reports.lanes import ROWS
from megatron_rl.workshop.reports.run_data import RunData

INK, MUTED, GRID = "#1f2937", "#6b7280", "#eceef1"
PALETTE = ("#2563eb", "#e8710a", "#12805c", "#7c3aed", "#c8324a", "#0b8aa5", "#9a6b00", "#5b6472")
DIFFICULTY = ("#12805c", "#2563eb", "#c3c8d0")  # all right, some, all wrong
DASHES = ("solid", "dash", "dot", "dashdot")
FONT = "Inter, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
HEIGHT = 270
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
LANE_COLOURS = {"sampler": "#2563eb", "rewards": "#0b8aa5", "rollout": "#e3e7ee", "checkpoint": "#5b6472"}
LANE_NAMES = {"rollout": "waits for answers"}
SYNC_PHASES = {
    "plan_s": "#c3c8d0",
    "quantize_s": "#8b5cf6",
    "gather_s": "#2563eb",
    "transfer_s": "#12805c",
    "load_s": "#e8710a",
}


def layout(figure: go.Figure, *, y_title: str = "", legend: bool = False, hover: str = "x unified") -> go.Figure:
    figure.update_layout(
        template="none",
        height=HEIGHT,
        margin={"l": 58, "r": 14, "t": 30 if legend else 10, "b": 38},
        font={"family": FONT, "size": 12, "color": INK},
        paper_bgcolor="white",
        plot_bgcolor="white",
        hovermode=hover,
        showlegend=legend,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11, "color": MUTED}},
    )
    axis = {"gridcolor": GRID, "zeroline": False, "linecolor": "#d5d9df", "tickfont": {"color": MUTED, "size": 11}}
    title = {"font": {"size": 11, "color": MUTED}, "standoff": 8}
    figure.update_xaxes(**axis, showgrid=False, showline=True, ticks="outside", tickcolor="#d5d9df", ticklen=4)
    figure.update_yaxes(**axis, title={**title, "text": y_title}, automargin=True)
    if not figure.layout.xaxis.title.text:
        figure.update_xaxes(title={**title, "text": "step"})
    return figure


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Centred, over the finite values inside the window; shorter at both ends."""
    half = window // 2
    means = []
    for index in range(len(values)):
        near = [value for value in values[max(0, index - half) : index + half + 1] if math.isfinite(value)]
        means.append(math.fsum(near) / len(near) if near else math.nan)
    return means


def curves(
    runs: Sequence[RunData],
    names: dict[str, str],
    *,
    y_title: str = "",
    smooth: bool = False,
    markers: bool = False,
    first_step: int = 0,
    scale: float = 1.0,
    from_zero: bool = False,
    y_range: tuple[float, float] | None = None,
) -> go.Figure | None:
    """`names`: metric -> label. With `smooth`, the values themselves are a pale line behind their running mean."""
    figure = go.Figure()
    several = len(runs) > 1
    for number, run in enumerate(runs):
        for index, (name, label) in enumerate(names.items()):
            series = run.series(name, first_step)
            if not series:
                continue
            series = Series(series.steps, [value * scale for value in series.values])
            colour = PALETTE[(number if several else index) % len(PALETTE)]
            line = {"color": colour, "width": 2, "dash": DASHES[index % len(DASHES)] if several else "solid"}
            title = (f"{run.name}: {label}" if len(names) > 1 else run.name) if several else label
            window = max(1, len(series.values) // 12) if smooth else 1
            if window > 1:
                pale = {**line, "width": 1}
                figure.add_scatter(
                    x=series.steps, y=_gaps(series), line=pale, opacity=0.3, hoverinfo="skip", showlegend=False
                )
            values = running_mean(series.values, window) if window > 1 else series.values
            figure.add_scatter(
                x=series.steps,
                y=_gaps(Series(series.steps, values)),
                name=title,
                mode="lines+markers" if markers or len(series.steps) == 1 else "lines",
                marker={"size": 6},
                line=line,
                hovertemplate="%{y:.4g}",
            )
    if not figure.data:
        return None
    shown = sum(trace.showlegend is not False for trace in figure.data)
    layout(figure, y_title=y_title, legend=not several and shown > 1)
    if y_range:
        figure.update_yaxes(range=list(y_range))
    elif from_zero:
        figure.update_yaxes(rangemode="tozero")
    return figure


def difficulty(runs: Sequence[RunData]) -> go.Figure | None:
    """Shares of groups, one above the other; of several runs only those with both kinds of answers."""
    figure = go.Figure()
    for number, run in enumerate(runs):
        counts = [run.series(f"rollout/{name}") for name in ("groups", "groups_all_right", "groups_all_wrong")]
        if not all(len(one.values) for one in counts):
            continue
        groups, right, wrong = (np.asarray(one.values) for one in counts)
        steps = counts[0].steps
        shares = {"all right": right / groups, "some": 1 - (right + wrong) / groups, "all wrong": wrong / groups}
        if len(runs) > 1:
            line = {"color": PALETTE[number % len(PALETTE)], "width": 2}
            figure.add_scatter(x=steps, y=shares["some"], name=run.name, mode="lines", line=line)
            continue
        for (name, share), colour in zip(shares.items(), DIFFICULTY, strict=True):
            line = {"width": 0.5, "color": colour}
            figure.add_scatter(x=steps, y=share, name=name, mode="lines", line=line, stackgroup="one")
    if not figure.data:
        return None
    layout(figure, legend=len(runs) == 1)
    return figure.update_yaxes(range=[0, 1])


def effective_sample_size(runs: Sequence[RunData]) -> go.Figure | None:
    """The axis ends at 1, and starts low enough to hold every value."""
    name = "rollout_corr/rollout_is_eff_sample_size"
    low = min((min(run.series(name).finite) for run in runs if run.series(name)), default=0.0)
    start = next(candidate for candidate in (0.95, 0.8, 0.5, 0.0) if low > candidate or candidate == 0.0)
    return curves(runs, {name: "ESS"}, y_range=(start, 1.0 + (1.0 - start) * 0.03))


def ratio_histogram(runs: Sequence[RunData]) -> go.Figure | None:
    """rho of the recorded tokens, the weights that were applied, and the bounds between."""
    found = [(number, run) for number, run in enumerate(runs) if run.tokens is not None]
    if not found:
        return None
    figure = go.Figure()
    reach = max(float(np.quantile(np.abs(run.tokens.log_ratio), 0.9995)) for _, run in found if run.tokens is not None)
    bounds = [b for _, run in found for b in weight_bounds(run) if b]
    reach = min(max([reach * 1.1, 0.05, *(abs(math.log(b)) * 1.1 for b in bounds)]), 8.0)
    fewest = min(len(run.tokens.log_ratio) for _, run in found if run.tokens is not None)
    edges = np.linspace(-reach, reach, 82 if fewest > 5000 else 42)
    centres = np.exp((edges[:-1] + edges[1:]) / 2)
    floor = 0.5 / max(len(run.tokens.log_ratio) for _, run in found if run.tokens is not None)

    def add(log_values: np.ndarray, title: str, line: dict[str, object], fill: bool = False) -> None:
        share = np.histogram(np.clip(log_values, -reach, reach), edges)[0] / max(1, len(log_values))
        figure.add_scatter(
            x=centres,
            y=np.maximum(share, floor).tolist(),  # a log axis has no zero: empty bins lie on the axis
            name=title,
            mode="lines",
            line={"shape": "hvh", **line},
            fill="tozeroy" if fill else None,
            fillcolor="rgba(37,99,235,0.12)",
            hovertemplate="%{y:.3%}",
        )

    several = len(runs) > 1
    for number, run in found:
        assert run.tokens is not None
        applied = run.tokens.weights[np.isfinite(run.tokens.weights) & (run.tokens.weights > 0)]
        if not several and len(applied):
            add(np.log(applied), "applied weight", {"color": "#f6b77f", "width": 5})
        colour = PALETTE[number if several else 0]
        add(run.tokens.log_ratio, run.name if several else "rho", {"color": colour, "width": 1.6}, not several)
    layout(figure, y_title="share of tokens", legend=not several)
    for bound in sorted(set(bounds)):
        figure.add_vline(x=bound, line={"color": PALETTE[4], "width": 1.2, "dash": "dash"})
        figure.add_annotation(
            x=math.log10(bound),  # annotations, unlike shapes, are placed by exponent on a log axis
            y=1,
            yref="paper",
            text=f"bound {bound:g} ",
            xanchor="right",
            yanchor="top",
            showarrow=False,
            font={"size": 11, "color": PALETTE[4]},
        )
    ticks = _ratio_ticks(reach)
    figure.update_xaxes(
        type="log",
        title={"text": "ratio"},
        range=[-reach / math.log(10), reach / math.log(10)],
        tickvals=ticks,
        ticktext=[f"{tick:.3g}" for tick in ticks],
        tickangle=0,
    )
    figure.update_yaxes(type="log", exponentformat="power", dtick=1, range=[math.log10(floor), 0])
    return figure


def weight_bounds(run: RunData) -> list[float | None]:
    """Bounds at which a token's ratio is clamped; those of a sequence weight act on another quantity."""
    if run.setting("correction.weight.level", "none") != "token":
        return []
    bounds = [run.setting("correction.weight.low"), run.setting("correction.weight.high")]
    return [bound if isinstance(bound, int | float) else None for bound in bounds]


def mismatch_by(runs: Sequence[RunData], by: str, x_title: str) -> go.Figure | None:
    """Mean absolute logprob difference of the recorded tokens along one cut; None where all are alike."""
    parts = {run.name: {part.label: part for part in run.mismatch if part.by == by} for run in runs}
    labels = [part.label for part in pooled(part for found in parts.values() for part in found.values())]
    if len(labels) < 2:
        return None
    figure = go.Figure()
    for number, found in enumerate(parts.values()):
        if found:
            figure.add_bar(
                x=[label.removesuffix(" %") for label in labels],  # the axis title says it, and the ticks stay level
                y=[found[label].abs_diff if label in found else None for label in labels],
                name=runs[number].name,
                marker={"color": PALETTE[number % len(PALETTE)]},
                customdata=[found[label].tokens if label in found else 0 for label in labels],
                hovertemplate="%{y:.4f} (%{customdata:,} tokens)",
            )
    layout(figure, y_title="mean |difference|, nats")
    figure.update_layout(bargap=0.35)
    return figure.update_xaxes(title={"text": x_title}, type="category")


def time_split(runs: Sequence[RunData]) -> go.Figure | None:
    return _split(runs, {f"time/{phase}": (phase, colour) for phase, colour in TIME_PHASES.items()})


def sync_split(runs: Sequence[RunData]) -> go.Figure | None:
    return _split(runs, {f"sync/{p}": (p.removesuffix("_s"), colour) for p, colour in SYNC_PHASES.items()})


def lane_colour(lane: str) -> str:
    return LANE_COLOURS.get(lane) or TIME_PHASES.get(lane, MUTED)


def lanes(runs: Sequence[RunData]) -> go.Figure | None:
    """Who was at work when, for a few steps of one run; pale: the learner waits for answers."""
    spans = runs[0].lanes if len(runs) == 1 else []
    if not any(one.lane == "sampler" for one in spans):
        return None
    figure = go.Figure()
    for lane in dict.fromkeys(lane for lanes in ROWS.values() for lane in lanes):
        mine = [one for one in spans if one.lane == lane]
        if mine:
            figure.add_bar(
                x=[one.end - one.begin for one in mine],
                base=[one.begin for one in mine],
                y=[one.row for one in mine],
                orientation="h",
                name=LANE_NAMES.get(lane, lane),
                marker={"color": lane_colour(lane), "line": {"width": 0}},
                customdata=[one.step for one in mine],
                hovertemplate="step %{customdata}: %{x:.3f} s",
            )
    layout(figure, legend=True, hover="closest")
    figure.update_layout(barmode="overlay", bargap=0.35)
    figure.update_xaxes(title={"text": "seconds"})
    return figure.update_yaxes(categoryorder="array", categoryarray=list(ROWS), autorange="reversed", showgrid=False)


def _split(runs: Sequence[RunData], phases: dict[str, tuple[str, str]]) -> go.Figure | None:
    """One run: seconds per step, stacked. Several: the mean step of each, as a bar."""
    figure = go.Figure()
    for name, (label, colour) in phases.items():
        if len(runs) == 1:
            series = runs[0].series(name, first_step=1)
            if any(series.finite):
                figure.add_bar(
                    x=series.steps, y=_gaps(series), name=label, marker={"color": colour}, hovertemplate="%{y:.3f} s"
                )
            continue
        totals = [run.total(name, 1) / max(1, len(run.series("time/step", 1).steps)) for run in runs]
        if any(totals):
            figure.add_bar(
                x=totals,
                y=[run.name for run in runs],
                name=label,
                marker={"color": colour},
                orientation="h",
                hovertemplate="%{x:.3f} s",
            )
    if not figure.data:
        return None
    several = len(runs) > 1
    layout(figure, y_title="" if several else "seconds", legend=True, hover="closest" if several else "x unified")
    figure.update_layout(legend_traceorder="normal", barmode="stack", bargap=0.4 if several else 0.08)
    if several:
        figure.update_xaxes(title={"text": "seconds per step, mean"})
        figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def _gaps(series: Series) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in series.values]


def _ratio_ticks(reach: float) -> list[float]:
    """1, and round ratios to both sides of it, far enough apart to be read."""
    picks: list[float] = []
    for tick in (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 30, 100, 1000):
        place = math.log(tick)
        before = math.log(picks[-1]) if picks else 0.0
        if place <= reach * 0.97 and place - before > reach * 0.22:
            picks.append(tick)
    return [*(1 / tick for tick in reversed(picks)), 1, *picks]
