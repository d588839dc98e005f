"""`megatron-rl mismatch`: where a learner and an engine of one stored model come to differ, as
table, page and JSON.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from megatron_rl.batch import collate
from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Config, Router
from megatron_rl.data.dataset import Source
from megatron_rl.data.prompts import FolderTokenizer
from megatron_rl.files import write_whole
from megatron_rl.learner.learner import Learner
from megatron_rl.learner.policy import Sections
from megatron_rl.models.model import Model
from megatron_rl.runs.console import table
from megatron_rl.runs.rollout_file import load_recorded, recorded_steps
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.sampler.engine_settings import EngineSettings
from megatron_rl.sampler.sampler import Sampler
from megatron_rl.types import Prompt, Rollout, SamplingParams, Scored, written
from megatron_rl.workshop.evaluation.adapters import is_peft
from megatron_rl.workshop.evaluation.stored_model import StoredModel, served
from megatron_rl.workshop.mismatch.walk import LOGPROB, Difference, Walk
from megatron_rl.workshop.reports.charts import PALETTE, layout
from megatron_rl.workshop.reports.run_data import session_table

RESULT = "mismatch.json"
PAGE = "mismatch.html"
HEAD = ("point", "apart: mean", "max", "own: mean", "max", "KL that enters", "share")
# points, above which the terminal shows them by kind, and those by themselves that matter most
WHOLE = 100
MOST = 20
RANDOM_TOKENS = 8  # of a prompt, where nothing else is named


@dataclass(frozen=True)
class Wanted:
    count: int
    tokens: int  # of each at most, prompt and answer
    prompts: Path | None = None  # a file
    run: Path | None = None


@dataclass
class _Seen:
    walk: Walk
    sequences: int = 0
    # what the engine sampled, and the same as one prompt
    itself: Difference = field(default_factory=Difference)
    # recorded tokens that go to other experts now, by layer
    moved: list[np.ndarray] = field(default_factory=list)

    def add(self, sampler: Sampler, rollout: Rollout, fresh: bool) -> None:
        prompt = rollout.prompt.token_ids
        tokens = [*prompt, *rollout.token_ids]
        values = sampler.activations(tokens)
        if self.walk.learner.learner.router is Router.replay:
            now_SLK = routed(sampler, tokens, self.walk.learner.shape.layers)
            if not fresh and rollout.experts_SLK is not None:
                was_SLK, is_SLK = (
                    np.sort(one_SLK, axis=2) for one_SLK in (rollout.experts_SLK, now_SLK)
                )
                self.moved.append((was_SLK != is_SLK[: len(was_SLK)]).any(axis=2))
            rollout = replace(rollout, experts_SLK=now_SLK)
        self.walk.add(collate([Scored(rollout, reward=0.0)]), values)
        self.sequences += 1
        if fresh:
            self.itself.add(
                values[str(LOGPROB)][len(prompt) - 1 :, 0] - torch.tensor(rollout.logprobs)
            )


def measure(
    config: Config, stored: StoredModel, wanted: Wanted, folder: Path, note: Callable[[str], None]
) -> str:
    """The table. `folder` gets the numbers and a page."""
    model = Model.read(stored.folder, config.learner, config.model.head_precision)
    if is_peft(stored.weights):
        raise ConfigError(
            f"{stored.weights}: PEFT's; name the run, or merge it first: python tools/convert.py "
            "export"
        )
    if stored.base != stored.weights:
        model = replace(model, shape=replace(model.shape, lora=stored.lora))
    # the temperature at which an engine says what a prompt was worth
    whole = replace(config, rollout=replace(config.rollout, temperature=1.0))
    # to which the engine adds a token
    room = min(wanted.tokens, EngineSettings.from_config(config).max_tokens - 1)
    rollouts = recorded(wanted, room)
    if rollouts:
        asked = []
    else:
        asked = prompts(config, stored.folder, model.shape.vocab, wanted, room)
    folder.mkdir(parents=True, exist_ok=True)
    with served(config, stored, note, folder) as sampler:
        learner = Learner(model, Sections.of(whole))
        for weights in dict.fromkeys((stored.base, stored.weights)):
            learner.load_hf(weights)
        seen = _Seen(Walk(learner))
        for rollout in rollouts or answered(sampler, asked, room):
            seen.add(sampler, rollout, fresh=bool(asked))
            note(f"{seen.sequences} of {len(rollouts or asked)} sequences")
    result = _summary(config, stored, seen)
    write_whole(folder / RESULT, json.dumps(result, indent=1) + "\n")
    drawn = figure(result).to_html(
        include_plotlyjs=True, config={"displayModeBar": False, "responsive": True}
    )
    write_whole(folder / PAGE, str(drawn))
    if wanted.run is None:
        steps = []
    else:
        steps = recorded_steps(RunDir(wanted.run).rollouts)[-1:]
    return "\n".join(_described(result)) + session_table(load_recorded(path) for _, path in steps)


def routed(sampler: Sampler, tokens: Sequence[int], layers: int) -> np.ndarray:
    """The experts that the engine chooses for these tokens as it is now; the last is not read."""
    told = sampler.routed_experts([tokens], layers)
    if told is None:
        raise ConfigError(
            "learner.router: replay, but this engine tells no choices of a sequence; use own"
        )
    return told[0][:-1].astype(np.int16)


def recorded(wanted: Wanted, room: int) -> list[Rollout]:
    """Sequences of the last recorded step, spread over it, as far as there is room; none without a
    run.
    """
    if wanted.run and wanted.prompts is None:
        steps = recorded_steps(RunDir(wanted.run).rollouts)
    else:
        steps = []
    if not steps:
        return []
    whole = [one.rollout for one in load_recorded(steps[-1][1]).scored]
    every = [rollout for rollout in whole if rollout.token_ids]
    return [
        cut(rollout, room)
        for rollout in every[:: max(1, len(every) // wanted.count)][: wanted.count]
    ]


def prompts(config: Config, folder: Path, vocab: int, wanted: Wanted, room: int) -> list[Prompt]:
    """Prompts of the file, or random ones: what the engine makes of them is a text of its own."""
    if wanted.prompts is None:
        draw = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            vocab, (wanted.count, min(RANDOM_TOKENS, room // 2)), generator=draw
        ).tolist()
        return [Prompt(number, tuple(ids), "", {}) for number, ids in enumerate(tokens)]
    longest = config.rollout.max_prompt_tokens
    source = Source(
        "--prompts", wanted.prompts, config.data, FolderTokenizer(folder), needs_answer=False
    )
    found = source.load(longest, None).prompts[: wanted.count]
    if not found:
        raise ConfigError(
            f"--prompts {wanted.prompts}: it has no prompt of up to {longest} tokens; name another "
            "file"
        )
    return [_shortened(prompt, room // 2) for prompt in found]


def answered(sampler: Sampler, prompts: Sequence[Prompt], room: int) -> list[Rollout]:
    """One answer each, as far as there is room, at temperature 1."""
    left = room - max(len(prompt.token_ids) for prompt in prompts)
    return sampler.generate(prompts, SamplingParams(1, left), seed=0, first_group=0, step=0)


def cut(rollout: Rollout, room: int) -> Rollout:
    prompt = _shortened(rollout.prompt, max(room // 2, room - len(rollout.token_ids)))
    length = min(len(rollout.token_ids), room - len(prompt.token_ids))
    ids = rollout.token_ids[:length]
    logprobs = rollout.logprobs[:length]
    left_out = len(rollout.prompt.token_ids) - len(prompt.token_ids)
    experts_SLK = rollout.experts_SLK
    if experts_SLK is not None:
        experts_SLK = experts_SLK[left_out:][: len(prompt.token_ids) + length - 1]
    rollout = replace(
        rollout, prompt=prompt, token_ids=ids, logprobs=logprobs, experts_SLK=experts_SLK
    )
    # the engine says what a token was worth among all, whatever top_k has kept
    nothing: dict[str, Any] = dict.fromkeys(
        ("kept_ids", "kept_counts", "versions", "turns", "kinds", "credit")
    )
    return replace(rollout, loss_mask=written(length), **nothing)


def _shortened(prompt: Prompt, most: int) -> Prompt:
    """The prompt's end."""
    return replace(prompt, token_ids=prompt.token_ids[-most:])


def _summary(config: Config, stored: StoredModel, seen: _Seen) -> dict[str, Any]:
    walk = seen.walk
    logprob = walk.points[LOGPROB].apart
    whole = walk.kl / max(1, walk.tokens)
    entered = walk.entered()
    return {
        "model": str(stored.weights),
        "format": config.quantization.format.value,
        "forward": config.learner.forward.value,
        "precision": config.learner.precision.value,
        "head_precision": config.model.head_precision.value,
        "sequences": seen.sequences,
        "tokens": walk.tokens,
        "kl": whole,
        "d": {
            "mean": walk.signed / max(1, walk.tokens),
            "mean_abs": logprob.mean,
            "max_abs": logprob.max,
        },
        "engine_itself": {"mean_abs": seen.itself.mean, "max_abs": seen.itself.max}
        if seen.itself.count
        else None,
        "experts": experts_told(seen),
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


def experts_told(seen: _Seen) -> dict[str, float | None] | None:
    """Shares of tokens and layers: what the learner's routers would choose otherwise than the
    engine's, whose choices they took, and what the engine has chosen otherwise when the sequences
    were recorded; None without replay.
    """
    replayed = seen.walk.learner.take_replayed()
    if not replayed:
        return None
    if seen.moved:
        moved = float(np.concatenate(seen.moved).mean())
    else:
        moved = None
    return {"flips": replayed["router/flips"], "moved": moved}


def _described(result: Mapping[str, Any]) -> Iterator[str]:
    points: Sequence[Mapping[str, Any]] = result["points"]
    if len(points) <= WHOLE:
        yield from table(HEAD, [_row(point["point"], [point]) for point in points])
    else:
        by_kind = sorted(
            points, key=lambda point: [one["kind"] for one in points].index(point["kind"])
        )
        groups = [
            (kind, list(group)) for kind, group in groupby(by_kind, key=lambda point: point["kind"])
        ]
        yield from table(HEAD, [_row(f"{kind} ({len(group)})", group) for kind, group in groups])
        most = sorted(points, key=lambda point: -abs(point["kl_enters"]))[:MOST]
        yield ""
        yield from table(HEAD, [_row(point["point"], [point]) for point in points if point in most])
    d = result["d"]
    itself = result["engine_itself"]
    yield (
        f"KL(sampler, learner) {result['kl']:.3g} nats a token; d = learner's logprob less the "
        f"sampler's: mean {d['mean']:+.2g}, mean |d| {d['mean_abs']:.2g}, largest "
        f"{d['max_abs']:.2g}, over {result['tokens']} tokens of {result['sequences']} sequences"
    )
    if told := result["experts"]:
        if told["moved"] is None:
            then = ""
        else:
            then = f"; since they were recorded {told['moved']:.2%} have moved"
        yield f"experts: all are the sampler's; the learner's routers would choose {told['flips']:.2%} otherwise{then}"
    if itself:
        yield (
            "the sampler itself, token by token and as one prompt: mean |difference| "
            f"{itself['mean_abs']:.2g}, largest {itself['max_abs']:.2g}"
        )


def _row(name: str, group: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A row of the table: of one point, or of all points of a kind (the mean of their means, the
    largest of all).
    """
    sizes: list[float] = []
    for side in ("apart", "own"):
        sizes.append(sum(point[side]["mean"] for point in group) / len(group))
        sizes.append(max(point[side]["max"] for point in group))
    enters, share = (sum(point[key] for point in group) for key in ("kl_enters", "share"))
    return name, *(f"{size:.2e}" for size in (*sizes, enters)), f"{share:.1%}"


LEAST = 1e-12  # what a logarithmic axis shows of zero


def figure(result: Mapping[str, Any]) -> go.Figure:
    """Over the points in order: what each adds to the KL, what it adds to the values, and how far
    both are apart.
    """
    points = result["points"]
    names = [point["point"] for point in points]
    titles = ("KL that enters, nats a token", "mean |difference| of the values")
    drawn = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, subplot_titles=titles
    )
    enters, shares = ([point[key] for point in points] for key in ("kl_enters", "share"))
    about = {
        "marker": {"color": PALETTE[1]},
        "showlegend": False,
        "hovertemplate": "%{y:.3g} (%{customdata:.1%})",
    }
    drawn.add_bar(x=names, y=enters, customdata=shares, name="enters", **about)
    for side, label, colour in (
        ("apart", "each by itself", PALETTE[0]),
        ("own", "from equal inputs", PALETTE[1]),
    ):
        means = [max(point[side]["mean"], LEAST) for point in points]
        look = {
            "mode": "lines+markers",
            "line": {"color": colour, "width": 1.5},
            "hovertemplate": "%{y:.3g}",
        }
        drawn.add_scatter(x=names, y=means, name=label, row=2, col=1, **look)
    layout(drawn, legend=True)
    drawn.update_layout(
        height=760, margin={"t": 90, "b": 140}, title={"text": _title(result), "font": {"size": 15}}
    )
    drawn.update_xaxes(title={"text": ""}, tickangle=-60)
    drawn.update_yaxes(type="log", exponentformat="power", row=2, col=1)
    return drawn


def _title(result: Mapping[str, Any]) -> str:
    if result["format"] == "none":
        format = "BF16"
    else:
        format = result["format"].upper()
    return (
        f"{result['model']}: sampler {format}, learner {result['precision']} "
        f"({result['forward']}); KL {result['kl']:.3g} nats a token, mean |d| "
        f"{result['d']['mean_abs']:.2g}, {result['tokens']} tokens"
    )
