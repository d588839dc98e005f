"""Answers on the report's page: of the first and the last recorded step, each token coloured by its mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from megatron_rl.runs.console import finding
from megatron_rl.runs.rollout_file import read_rollouts, recorded_steps
from megatron_rl.runs.run_dir import RunDir
from megatron_rl.workshop.reports.run_data import RunData, readable

PROMPT = 1500  # characters
HEAD, TAIL = 120, 280  # tokens of a long answer
FULL = 0.5  # nats at which a colour is full


def section(runs: Sequence[RunData]) -> str:
    if len(runs) != 1:
        return ""
    run, steps = runs[0], recorded_steps(RunDir(runs[0].path).rollouts)
    nothing: list[str] = []
    ends = dict.fromkeys([*steps[:1], *steps[-1:]])
    shown = [card for step, path in ends for card in readable(path, partial(_cards, step), nothing, run.unreadable)]
    about = "The first and the last recorded step. Orange: less likely to the learner than to the sampler; blue: more."
    return f"<h2>Answers</h2><p class=about>{about}</p>{''.join(shown)}" if shown else ""


def _cards(step: int, path: Path) -> list[str]:
    table = read_rollouts(path)
    if "pieces" not in table.column_names:
        return []
    return [_card(step, row) for row in table.filter(pc.is_valid(table.column("pieces"))).to_pylist()]


def _card(step: int, row: Mapping[str, Any]) -> str:
    found = finding(row["verdict"], row["error"])
    facts = [
        f"step {step}",
        found,
        f"reward {row['reward']:g}",
        f"{len(row['token_ids'])} tokens",
        row["finish_reason"],
    ]
    differences = _differences(row)
    known = [abs(value) for value in differences if math.isfinite(value)]
    if known:
        facts.append(f"mean |d| {sum(known) / len(known):.3f}")
    prompt = row["prompt"] if len(row["prompt"]) <= PROMPT else f"...{row['prompt'][-PROMPT:]}"
    truth = f"<p>Truth: <code>{escape(str(row['truth'])[:300])}</code></p>" if row["truth"] is not None else ""
    kind = "right" if row["verdict"] == "right" else "other"
    return (
        f"<section class='answer {kind}'><p><b>{escape(' · '.join(facts))}</b></p><pre>{escape(prompt)}</pre>"
        f"<pre class=tokens>{''.join(_tokens(row['pieces'], differences))}</pre>{truth}</section>"
    )


def _differences(row: Mapping[str, Any]) -> list[float]:
    if row["prox_logprobs"] is None:
        return [math.nan] * len(row["token_ids"])
    return [p - mu for p, mu in zip(row["prox_logprobs"], row["sampler_logprobs"], strict=True)]


def _tokens(pieces: Sequence[str], differences: Sequence[float]) -> Iterator[str]:
    for place, (piece, d) in enumerate(zip(pieces, differences, strict=True)):
        if HEAD <= place < len(pieces) - TAIL:
            if place == HEAD:
                yield f"<i>\n... {len(pieces) - TAIL - HEAD:,} tokens ...\n</i>"
            continue
        if not math.isfinite(d):
            yield f"<span>{escape(piece)}</span>"
            continue
        colour = "232,113,10" if d < 0 else "37,99,235"
        strength = min(1.0, abs(d) / FULL)
        yield f"<span style='background:rgba({colour},{strength:.2f})' title='d {d:+.4f}'>{escape(piece)}</span>"
