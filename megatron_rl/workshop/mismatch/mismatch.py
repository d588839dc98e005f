"""`megatron-rl mismatch`: where a learner and an engine of one stored model come to differ, as a table and a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from megatron_rl.config.schema import Config
from megatron_rl.files import write_whole
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.policy import Sections
from megatron_rl.models.model import Model
from megatron_rl.runs.console import table
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Rollout, Scored, collate
from megatron_rl.workshop.evaluation.stored_model import StoredModel, served
from megatron_rl.workshop.mismatch.sequences import Wanted, answered, prompts, recorded
from megatron_rl.workshop.mismatch.walk import LOGPROB, Difference, Walk
from megatron_rl.workshop.reports.figures import PALETTE, layout

RESULT, PAGE = "mismatch.json", "mismatch.html"
HEAD = ("point", "apart: mean", "max", "own: mean", "max", "KL that enters", "share")
WHOLE = 100  # points, above which the terminal shows them by kind, and those by themselves that matter most
MOST = 20


@dataclass
class _Seen:
    walk: Walk
    sequences: int = 0
    itself: Difference = field(default_factory=Difference)  # what the engine sampled, and the same as one prompt

    def add(self, sampler: Sampler, rollout: Rollout, fresh: bool) -> None:
        prompt = rollout.prompt.token_ids
        values = sampler.activations([*prompt, *rollout.token_ids])
        self.walk.add(collate([Scored(rollout, reward=0.0)]), values)
        self.sequences += 1
        if fresh:
            self.itself.add(values[str(LOGPROB)][len(prompt) - 1 :, 0] - torch.tensor(rollout.logprobs))


def measure(config: Config, stored: StoredModel, wanted: Wanted, folder: Path, note: Callable[[str], None]) -> str:
    """The table. `folder` gets the numbers and a page."""
    model = Model.read(stored.folder, config.learner, config.model.head_precision)
    room = min(wanted.tokens, EngineSettings.from_config(config).max_tokens - 1)  # to which the engine adds a token
    rollouts = recorded(wanted, room)
    asked = [] if rollouts else prompts(config, stored.folder, model.shape.vocab, wanted, room)
    folder.mkdir(parents=True, exist_ok=True)
    with served(config, stored, note, folder) as sampler:
        seen = _Seen(Walk(_learner(config, stored, model)))
        for rollout in rollouts or answered(sampler, asked, room):
            seen.add(sampler, rollout, fresh=bool(asked))
            note(f"{seen.sequences} of {len(rollouts or asked)} sequences")
    result = _summary(config, stored, seen)
    write_whole(folder / RESULT, json.dumps(result, indent=1) + "\n")
    write_whole(folder / PAGE, page(result))
    return "\n".join(_described(result))


def _learner(config: Config, stored: StoredModel, model: Model) -> Learner:
    # at which an engine says what a prompt was worth
    config = replace(config, rollout=replace(config.rollout, temperature=1.0))
    learner = Learner(model, Sections.of(config))
    learner.load_hf(stored.weights)
    return learner


def _summary(config: Config, stored: StoredModel, seen: _Seen) -> dict[str, Any]:
    walk = seen.walk
    logprob, whole, entered = walk.points[LOGPROB].apart, walk.kl / max(1, walk.tokens), walk.entered()
    return {
        "model": str(stored.weights),
        "format": config.quantization.format.value,
        "forward": config.learner.forward.value,
        "precision": config.learner.precision.value,
        "head_precision": config.model.head_precision.value,
        "sequences": seen.sequences,
        "tokens": walk.tokens,
        "kl": whole,
        "d": {"mean": walk.signed / max(1, walk.tokens), "mean_abs": logprob.mean, "max_abs": logprob.max},
        "engine_itself": {"mean_abs": seen.itself.mean, "max_abs": seen.itself.max} if seen.itself.count else None,
        "points": [
            {
                "point": str(point),
                "kind": point.kind.value,
                "layer": point.layer,
                "apart": {"mean": found.apart.mean, "max": found.apart.max},
                "own": {"mean": found.own.mean, "max": found.own.max},
                "kl_enters": entered[point],
                "share": entered[point] / whole if whole else 0.0,
            }
            for point, found in walk.points.items()
        ],
    }


def _described(result: Mapping[str, Any]) -> Iterator[str]:
    points: Sequence[Mapping[str, Any]] = result["points"]
    if len(points) <= WHOLE:
        yield from table(HEAD, [_row(point["point"], [point]) for point in points])
    else:
        by_kind = sorted(points, key=lambda point: [one["kind"] for one in points].index(point["kind"]))
        groups = [(kind, list(group)) for kind, group in groupby(by_kind, key=lambda point: point["kind"])]
        yield from table(HEAD, [_row(f"{kind} ({len(group)})", group) for kind, group in groups])
        most = sorted(points, key=lambda point: -abs(point["kl_enters"]))[:MOST]
        yield ""
        yield from table(HEAD, [_row(point["point"], [point]) for point in points if point in most])
    d, itself = result["d"], result["engine_itself"]
    yield (
        f"KL(sampler, learner) {result['kl']:.3g} nats a token; d = learner's logprob less the sampler's: mean "
        f"{d['mean']:+.2g}, mean |d| {d['mean_abs']:.2g}, largest {d['max_abs']:.2g}, over {result['tokens']} tokens "
        f"of {result['sequences']} sequences"
    )
    if itself:
        yield (
            f"the sampler itself, token by token and as one prompt: mean |difference| {itself['mean_abs']:.2g}, "
            f"largest {itself['max_abs']:.2g}"
        )


def _row(name: str, group: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A row of the table: of one point, or of all points of a kind (the mean of their means, the largest of all)."""
    sizes = [
        f"{size:.2e}"
        for side in ("apart", "own")
        for size in (
            sum(point[side]["mean"] for point in group) / len(group),
            max(point[side]["max"] for point in group),
        )
    ]
    return name, *sizes, f"{sum(point['kl_enters'] for point in group):.2e}", f"{sum(p['share'] for p in group):.1%}"


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
