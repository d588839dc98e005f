"""Plotly figures of runs (accuracy, groups, ratios, mismatch, times, lanes, plan); None where no
run has the data.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from megatron_rl.rollout_correction.breakdown import pooled
from megatron_rl.runs.metrics import accuracies
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.reports.charts import (
    MUTED,
    PALETTE,
    UNIT,
    add_band,
    add_bars,
    add_line,
    colour,
    curves,
    layout,
)
from megatron_rl.workshop.reports.run_data import ROWS, RunData, readable

GIB = 2**30
DIFFICULTY = ("#12805c", "#2563eb", "#c3c8d0")  # all right, some, all wrong
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
LANE_COLOURS = {
    "sampler": "#2563eb",
    "rewards": "#0b8aa5",
    "rollout": "#e3e7ee",
    "checkpoint": "#5b6472",
}
LANE_NAMES = {"rollout": "waits for answers"}
SYNC_PHASES = {
    "plan_s": "#c3c8d0",
    "quantize_s": "#8b5cf6",
    "gather_s": "#2563eb",
    "transfer_s": "#12805c",
    "load_s": "#e8710a",
}


def accuracy(runs: Sequence[RunData]) -> go.Figure | None:
    """On every evaluated set, each with its standard error as a band."""
    sets = accuracies({name: None for run in runs for line in run.lines for name in line})
    labels = {name: "accuracy" if label == "eval" else label for name, label in sets.items()}
    figure = curves(runs, labels, markers=True, y_range=UNIT)
    if figure is None:
        return None
    # in the order of `curves`
    drawn = [(run, name) for run in runs for name in sets if run.series(name)]
    for (run, name), line in zip(drawn, list(figure.data), strict=True):
        values = run.series(name)
        errors = run.series(f"{name}_stderr")
        around = dict(zip(errors.steps, errors.values, strict=True))
        band = [
            (x, y, around[x])
            for x, y in zip(values.steps, values.values, strict=True)
            if x in around
        ]
        if len(band) > 1:
            low, high = ([y + side * e for _, y, e in band] for side in (-1, 1))
            add_band(figure, [x for x, _, _ in band], low, high, line.line.color)
    return figure


def difficulty(runs: Sequence[RunData]) -> go.Figure | None:
    """Shares of groups, one above the other; of several runs only those with both kinds of
    answers.
    """
    figure = go.Figure()
    for number, run in enumerate(runs):
        counts = [
            run.series(f"rollout/{name}")
            for name in ("groups", "groups_all_right", "groups_all_wrong")
        ]
        if not all(len(one.values) for one in counts):
            continue
        groups, right, wrong = (np.asarray(one.values) for one in counts)
        steps = counts[0].steps
        shares = {
            "all right": right / groups,
            "some": 1 - (right + wrong) / groups,
            "all wrong": wrong / groups,
        }
        if len(runs) > 1:
            add_line(figure, steps, shares["some"], colour(number), name=run.name)
            continue
        for (name, share), paint in zip(shares.items(), DIFFICULTY, strict=True):
            add_line(figure, steps, share, paint, width=0.5, name=name, stackgroup="one")
    if not figure.data:
        return None
    layout(figure, legend=len(runs) == 1)
    return figure.update_yaxes(range=[0, 1])


def effective_sample_size(runs: Sequence[RunData]) -> go.Figure | None:
    """The axis ends at 1, and starts low enough to hold every value."""
    name = "rollout_corr/rollout_is_eff_sample_size"
    low = min((min(run.series(name).finite) for run in runs if run.series(name)), default=0.0)
    start = next(
        candidate for candidate in (0.95, 0.8, 0.5, 0.0) if low > candidate or candidate == 0.0
    )
    return curves(runs, {name: "ESS"}, y_range=(start, 1.0 + (1.0 - start) * 0.03))


def ratio_histogram(runs: Sequence[RunData]) -> go.Figure | None:
    """rho of the recorded tokens, the weights that were applied, and the bounds between."""
    found = [(number, run, run.tokens) for number, run in enumerate(runs) if run.tokens is not None]
    if not found:
        return None
    bounds = [bound for _, run, _ in found for bound in weight_bounds(run) if bound]
    counts = [len(tokens.log_ratio) for _, _, tokens in found]
    reach = 1.1 * max(
        float(np.quantile(np.abs(tokens.log_ratio), 0.9995)) for _, _, tokens in found
    )
    reach = min(max([reach, 0.05, *(abs(math.log(bound)) * 1.1 for bound in bounds)]), 8.0)
    edges = np.linspace(-reach, reach, 82 if min(counts) > 5000 else 42)
    centres = np.exp((edges[:-1] + edges[1:]) / 2)
    floor = 0.5 / max(counts)
    figure = go.Figure()
    several = len(runs) > 1

    def add(
        log_values: np.ndarray, title: str, paint: str, width: float, fill: bool = False
    ) -> None:
        share = np.histogram(np.clip(log_values, -reach, reach), edges)[0] / max(1, len(log_values))
        # a log axis has no zero: empty bins lie on the axis
        shown = np.maximum(share, floor).tolist()
        look: dict[str, Any] = {
            "fill": "tozeroy" if fill else None,
            "fillcolor": "rgba(37,99,235,0.12)",
        }
        add_line(
            figure,
            centres,
            shown,
            paint,
            width=width,
            shape="hvh",
            name=title,
            hovertemplate="%{y:.3%}",
            **look,
        )

    for number, run, tokens in found:
        applied = tokens.weights[np.isfinite(tokens.weights) & (tokens.weights > 0)]
        if not several and len(applied):
            add(np.log(applied), "applied weight", "#f6b77f", 5)
        add(
            tokens.log_ratio,
            run.name if several else "rho",
            colour(number if several else 0),
            1.6,
            not several,
        )
    layout(figure, y_title="share of tokens", legend=not several)
    for bound in sorted(set(bounds)):
        _mark_bound(figure, bound)
    ticks = _ratio_ticks(reach)
    end = reach / math.log(10)
    figure.update_xaxes(type="log", title={"text": "ratio"}, range=[-end, end], tickangle=0)
    figure.update_xaxes(tickvals=ticks, ticktext=[f"{tick:.3g}" for tick in ticks])
    return figure.update_yaxes(
        type="log", exponentformat="power", dtick=1, range=[math.log10(floor), 0]
    )


def _mark_bound(figure: go.Figure, bound: float) -> None:
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


def weight_bounds(run: RunData) -> list[float | None]:
    """Bounds at which a token's ratio is clamped; those of a sequence weight act on another
    quantity.
    """
    if run.setting("correction.weight.level", "none") != "token":
        return []
    bounds = [run.setting("correction.weight.low"), run.setting("correction.weight.high")]
    return [bound if isinstance(bound, int | float) else None for bound in bounds]


def _ratio_ticks(reach: float) -> list[float]:
    """1, and round ratios to both sides of it, far enough apart to be read."""
    picks: list[float] = []
    for tick in (1.01, 1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 30, 100, 1000):
        place = math.log(tick)
        before = math.log(picks[-1]) if picks else 0.0
        if place <= reach * 0.97 and place - before > reach * 0.22:
            picks.append(tick)
    return [*(1 / tick for tick in reversed(picks)), 1, *picks]


def mismatch_by(runs: Sequence[RunData], by: str, x_title: str) -> go.Figure | None:
    """Mean absolute logprob difference of the recorded tokens along one cut; None where all are
    alike.
    """
    parts = [{part.label: part for part in run.mismatch if part.by == by} for run in runs]
    labels = [part.label for part in pooled(part for found in parts for part in found.values())]
    if len(labels) < 2:
        return None
    figure = go.Figure()
    # the axis title says it, and the ticks stay level
    names = [label.removesuffix(" %") for label in labels]
    for number, (run, found) in enumerate(zip(runs, parts, strict=True)):
        if found:
            values = [found[label].abs_diff if label in found else None for label in labels]
            tokens = [found[label].tokens if label in found else 0 for label in labels]
            hover = "%{y:.4f} (%{customdata:,} tokens)"
            add_bars(figure, names, values, colour(number), hover, name=run.name, customdata=tokens)
    layout(figure, y_title="mean |difference|, nats").update_layout(bargap=0.35)
    return figure.update_xaxes(title={"text": x_title}, type="category")


def split(runs: Sequence[RunData], group: str, phases: Mapping[str, str]) -> go.Figure | None:
    """One run: seconds per step by phase, stacked. Several: the mean step of each, as a bar."""
    figure = go.Figure()
    several = len(runs) > 1
    for phase, paint in phases.items():
        name = f"{group}/{phase}"
        label = phase.removesuffix("_s")
        if several:
            totals = [
                run.total(name, 1) / max(1, len(run.series("time/step", 1).steps)) for run in runs
            ]
            if any(totals):
                names = [run.name for run in runs]
                add_bars(figure, totals, names, paint, "%{x:.3f} s", name=label, orientation="h")
        elif any((series := runs[0].series(name, first_step=1)).finite):
            seconds = [value if math.isfinite(value) else None for value in series.values]
            add_bars(figure, series.steps, seconds, paint, "%{y:.3f} s", name=label)
    if not figure.data:
        return None
    layout(
        figure,
        y_title="" if several else "seconds",
        legend=True,
        hover="closest" if several else "x unified",
    )
    figure.update_layout(
        legend_traceorder="normal", barmode="stack", bargap=0.4 if several else 0.08
    )
    if several:
        figure.update_xaxes(title={"text": "seconds per step, mean"})
        figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def lane_colour(lane: str) -> str:
    return LANE_COLOURS.get(lane) or TIME_PHASES.get(lane, MUTED)


def lanes(runs: Sequence[RunData]) -> go.Figure | None:
    """Who was at work when, for a few steps of one run; pale: the learner waits for answers."""
    spans = runs[0].lanes if len(runs) == 1 else []
    if not any(one.lane == "sampler" for one in spans):
        return None
    figure = go.Figure()
    for lane in dict.fromkeys(lane for lanes in ROWS.values() for lane in lanes):
        if mine := [one for one in spans if one.lane == lane]:
            add_bars(
                figure,
                [one.end - one.begin for one in mine],
                [one.row for one in mine],
                lane_colour(lane),
                "step %{customdata}: %{x:.3f} s",
                base=[one.begin for one in mine],
                orientation="h",
                name=LANE_NAMES.get(lane, lane),
                marker={"line": {"width": 0}},
                customdata=[one.step for one in mine],
            )
    layout(figure, legend=True, hover="closest").update_layout(barmode="overlay", bargap=0.35)
    figure.update_xaxes(title={"text": "seconds"})
    return figure.update_yaxes(
        categoryorder="array", categoryarray=list(ROWS), autorange="reversed", showgrid=False
    )


def planned(run: RunData) -> tuple[go.Figure | None, go.Figure | None]:
    """Memory by phase, and time beside the run's own, from plan.json; None where the file does not
    hold it.
    """
    path = RunDir(run.path).plan
    if not path.is_file():
        return None, None

    def drawn(path: Path) -> tuple[go.Figure | None, go.Figure | None]:
        found = json.loads(path.read_text("utf-8"))
        return _memory(found["memory"]), _time(run, found["seconds"] or {})

    return readable(path, drawn, (None, None), run.unreadable)


def _memory(kinds: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """A group of bars for each kind of GPU, a bar for each phase, stacked by what the memory is
    for.
    """
    figure = go.Figure()
    places = [
        (kind["of"], phase, found) for kind in kinds for phase, found in kind["phases"].items()
    ]
    for number, part in enumerate(dict.fromkeys(part for _, _, found in places for part in found)):
        bars = [[of for of, _, _ in places], [phase for _, phase, _ in places]]
        sizes = [found.get(part, 0.0) / GIB for _, _, found in places]
        # a colour's second time is hatched
        again = {"pattern": {"shape": "/"}} if number >= len(PALETTE) else {}
        add_bars(figure, bars, sizes, colour(number), "%{y:.3g} GiB", name=part, marker=again)
    for limit in {kind["limit"] for kind in kinds if kind["limit"]}:
        figure.add_hline(y=limit / GIB, line={"color": MUTED, "dash": "dot"})
    if not figure.data:
        return None
    return layout(figure, y_title="GiB", legend=True, hover="closest").update_layout(
        barmode="stack"
    )


def _time(run: RunData, planned: Mapping[str, float]) -> go.Figure | None:
    """Each phase as it was planned, and its median in the run."""
    medians = {phase: run.median(f"time/{phase}") for phase in planned}
    measured = {phase: seconds for phase, seconds in medians.items() if seconds is not None}
    if not measured:
        return None
    figure = go.Figure()
    for name, values, paint in (("planned", planned, MUTED), ("measured", measured, PALETTE[0])):
        add_bars(
            figure,
            [*measured],
            [values[phase] for phase in measured],
            paint,
            "%{y:.3g} s",
            name=name,
        )
    return layout(figure, y_title="seconds", legend=True, hover="closest").update_layout(
        barmode="group"
    )
