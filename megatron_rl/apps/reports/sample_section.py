"""Responses on the report's page, of the first and last recorded step, coloured by mismatch."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc

from megatron_rl.apps.reports.run_data import RunData, reading
from megatron_rl.tracking.console import finding
from megatron_rl.tracking.rollout_file import read_rollouts, recorded_steps, session_of
from megatron_rl.tracking.run_dir import RunDir
from megatron_rl.types import Session

PROMPT = 1500  # characters
# tokens of a long response
HEAD = 120
TAIL = 280
FULL = 0.5  # nats at which a colour is full
Answer = dict[str, Any]


class TokenSpan(NamedTuple):
    text: str
    background: str = ""
    title: str = ""
    cut: bool = False  # stands for tokens that are not shown


def answers(run: RunData) -> list[Answer]:
    steps = recorded_steps(RunDir(run.path).rollouts)
    found: list[Answer] = []
    for step, path in dict.fromkeys([*steps[:1], *steps[-1:]]):
        with reading(path, run.unreadable):
            found += _of_step(step, path)
    return found


def _of_step(step: int, path: Path) -> list[Answer]:
    table = read_rollouts(path)
    return [
        _answer(step, row) for row in table.filter(pc.is_valid(table.column("pieces"))).to_pylist()
    ]


def _answer(step: int, row: Mapping[str, Any]) -> Answer:
    differences = _differences(row)
    known = [abs(value) for value in differences if math.isfinite(value)]
    facts = [
        f"step {step}",
        finding(row["verdict"], row["error"]),
        f"reward {row['reward']:g}",
        f"{len(row['token_ids'])} tokens",
        row["finish_reason"],
    ]
    if known:
        facts.append(f"mean |d| {sum(known) / len(known):.3f}")
    session = session_of(row["session"])
    if session:
        calls = sum(turn.tool_calls for turn in session.turns)
        facts.append(f"{len(session.turns)} turns, {calls} tool calls, ended: {session.end}")
        if session.rows > 1:
            facts.append(f"branch {row['row'] + 1} of {session.rows}")
    return {
        "kind": "right" if row["verdict"] == "right" else "other",
        "facts": " · ".join(facts),
        "prompt": row["prompt"][-PROMPT:],
        "spans": list(spans(_with_speakers(row, session), differences)),
        "truth": None if row["truth"] is None else str(row["truth"])[:300],
    }


def _with_speakers(row: Mapping[str, Any], session: Session | None) -> list[str]:
    """The text of each token; of a session, with who begins to speak there."""
    turns = row["turns"] or []
    pieces = list(row["pieces"])
    for place, turn in enumerate(turns):
        if place and turn == turns[place - 1]:
            continue
        speaker = "environment"
        if turn >= 0:
            speaker = f"policy, turn {turn}"
            if session and session.turns[turn].reward is not None:
                speaker += f", reward {session.turns[turn].reward:g}"
        pieces[place] = f"\n[{speaker}]\n{pieces[place]}"
    return pieces


def _differences(row: Mapping[str, Any]) -> list[float]:
    """p - mu of each token; NaN where the environment wrote it."""
    if row["prox_logprobs"] is None:
        return [math.nan] * len(row["token_ids"])
    d = np.subtract(row["prox_logprobs"], row["sampler_logprobs"])
    if row["turns"]:
        d[np.array(row["turns"]) < 0] = math.nan
    return list(d)


def spans(pieces: Sequence[str], differences: Sequence[float]) -> Iterator[TokenSpan]:
    """Tokens of a response; of a long one, its two ends."""
    for place, (piece, d) in enumerate(zip(pieces, differences, strict=True)):
        if HEAD <= place < len(pieces) - TAIL:
            if place == HEAD:
                yield TokenSpan(f"\n... {len(pieces) - TAIL - HEAD:,} tokens ...\n", cut=True)
        elif math.isfinite(d):
            colour = "232,113,10" if d < 0 else "37,99,235"
            yield TokenSpan(piece, f"rgba({colour},{min(1.0, abs(d) / FULL):.2f})", f"d {d:+.4f}")
        else:
            yield TokenSpan(piece)
