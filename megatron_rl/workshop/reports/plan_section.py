"""The report's figures of what was planned: memory by phase, and time beside the run's own. From plan.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.reports.figures import MUTED, PALETTE, layout
from megatron_rl.workshop.reports.run_data import RunData, readable

GIB = 2**30


def figures(run: RunData) -> tuple[go.Figure | None, go.Figure | None]:
    """Memory, time; None where the file does not hold it."""
    path = RunDir(run.path).plan
    if not path.is_file():
        return None, None
    return readable(path, lambda path: _drawn(run, json.loads(path.read_text("utf-8"))), (None, None), run.unreadable)


def _drawn(run: RunData, planned: dict[str, Any]) -> tuple[go.Figure | None, go.Figure | None]:
    return _memory(planned["memory"]), _time(run, planned["seconds"] or {})


def _memory(kinds: Sequence[Mapping[str, Any]]) -> go.Figure | None:
    """A group of bars for each kind of GPU, a bar for each phase, stacked by what the memory is for."""
    parts = list(dict.fromkeys(part for kind in kinds for found in kind["phases"].values() for part in found))
    figure = go.Figure()
    for number, part in enumerate(parts):
        places = [
            (kind["of"], phase, found.get(part, 0.0)) for kind in kinds for phase, found in kind["phases"].items()
        ]
        figure.add_bar(
            x=[[of for of, _, _ in places], [phase for _, phase, _ in places]],
            y=[nbytes / GIB for _, _, nbytes in places],
            name=part,
            marker=_fill(number),
            hovertemplate="%{y:.3g} GiB",
        )
    for limit in {kind["limit"] for kind in kinds if kind["limit"]}:
        figure.add_hline(y=limit / GIB, line={"color": MUTED, "dash": "dot"})
    if not figure.data:
        return None
    layout(figure, y_title="GiB", legend=True, hover="closest")
    return figure.update_layout(barmode="stack")


def _fill(number: int) -> dict[str, Any]:
    """A colour of its own; beyond the palette, its colours again, hatched."""
    hatched = {"pattern": {"shape": "/"}} if number >= len(PALETTE) else {}
    return {"color": PALETTE[number % len(PALETTE)], **hatched}


def _time(run: RunData, planned: Mapping[str, float]) -> go.Figure | None:
    """Each phase as it was planned, and its median in the run."""
    measured = {phase: run.median(f"time/{phase}") for phase in planned}
    both = [phase for phase in planned if measured[phase] is not None]
    if not both:
        return None
    figure = go.Figure()
    for name, values, colour in (("planned", planned, MUTED), ("measured", measured, PALETTE[0])):
        figure.add_bar(
            x=both, y=[values[phase] for phase in both], name=name, marker={"color": colour}, hovertemplate="%{y:.3g} s"
        )
    layout(figure, y_title="seconds", legend=True, hover="closest")
    return figure.update_layout(barmode="group")
