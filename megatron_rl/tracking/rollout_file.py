"""Reader and writer of rollouts/step_N.parquet: a step's rollouts, a row each, with both logprobs.

Columns that a step does not have are null. Shape suffixes: B rows, N response tokens of all rows.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.files import JsonObject, replacing
from megatron_rl.types import Prompt, Rollout, Scored, Session, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_rl.batch import Batch

STEP = re.compile(r"step_([0-9]+)\.parquet")
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("policy_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("format", pa.string()),  # weight format of the engine
        ("reward", pa.float32()),
        ("error", pa.string()),
        ("verdict", pa.string()),
        ("text", pa.string()),  # the answer
        ("pieces", pa.list_(pa.string())),  # token texts, for the few displayed responses
        ("prompt", pa.string()),
        ("truth", pa.string()),  # the data set's own solution, as JSON where it is no text
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),  # NaN if the sampler reported none
        ("loss_mask", pa.list_(pa.bool_())),  # tokens written by the policy
        # with rollout.top_k: the sampling support of each token, one after the other
        ("kept_ids", pa.list_(pa.int32())),
        ("kept_counts", pa.list_(pa.int32())),  # size of the support at each token
        # with rollout.top_logprobs: the top tokens of each token, one after the other
        ("top_ids", pa.list_(pa.int32())),
        ("top_logprobs", pa.list_(pa.float16())),
        ("top_counts", pa.list_(pa.int16())),  # their number at each token
        # policy version of each token, where an update came between them
        ("versions", pa.list_(pa.int32())),
        # of a session: the turn that each token was sampled in, -1: in none
        ("turns", pa.list_(pa.int32())),
        ("credit", pa.list_(pa.float32())),  # of a session: see environment.credit
        ("row", pa.int32()),  # which branch of its session
        ("session", pa.string()),  # outcome and messages, as JSON
        ("prox_logprobs", pa.list_(pa.float32())),
        ("top_prox_logprobs", pa.list_(pa.float32())),  # of the top tokens, where they were read
        ("weights", pa.list_(pa.float32())),  # applied by rollout_correction
        ("kept", pa.list_(pa.bool_())),  # the mask after rollout_correction
        ("advantage", pa.float32()),
    ]
)

_OF_ROLLOUT = ("group", "sample", "policy_version", "finish_reason", "format")
# where there is any
_TOP = ("top_ids", "top_logprobs", "top_counts")
_OF_TOKENS = ("kept_ids", "kept_counts", *_TOP, "versions", "turns", "credit")
_ANSWER = ("token_ids", "sampler_logprobs", "loss_mask", *_OF_TOKENS)
LISTS = (*_ANSWER, "prox_logprobs", "top_prox_logprobs", "weights", "kept")
NEW = (*_TOP, "top_prox_logprobs")  # not in recordings of version 0.2.0
WORDS = [field.name for field in SCHEMA if field.type == pa.string()]
AS_TEXT: JsonObject = {"ensure_ascii": False, "default": str}
PIECE = 512  # rows that are written at once


class Columns(TypedDict, total=False):
    """Values that the step computed about its rollouts; a missing one is null in the file."""

    prox_logprobs_N: Tensor | None
    top_prox_logprobs_E: Tensor | None
    weights_N: Tensor | None
    mask_N: Tensor | None
    advantages_B: Tensor | None
    truths: Sequence[Any]  # the data set's own solutions
    pieces: Mapping[int, Sequence[str]]  # text of each token, by the index of the response


def write_rollouts(path: Path, scored: Sequence[Scored], **columns: Unpack[Columns]) -> None:
    lengths = np.array([len(one.rollout.token_ids) for one in scored], np.int64)
    top_ids = [one.rollout.top_ids for one in scored]
    top_sizes = np.array([0 if ids is None else len(ids) for ids in top_ids], np.int64)
    computed = _computed(lengths, top_sizes, columns)
    with (
        replacing(path) as partial,
        pq.ParquetWriter(partial, SCHEMA, compression="zstd", use_dictionary=WORDS) as file,
    ):
        for start in range(0, len(scored), PIECE):
            rows = slice(start, start + PIECE)
            table = _sampled(scored[rows], lengths[rows])
            table |= {name: column[rows] for name, column in computed.items()}
            file.write_table(pa.table(table, schema=SCHEMA))


def _sampled(scored: Sequence[Scored], lengths: np.ndarray) -> JsonObject:
    """Return the columns of samples and scores."""
    rollouts = [one.rollout for one in scored]
    return {
        **{
            name: [getattr(rollout, name) for rollout in rollouts] for name in (*_OF_ROLLOUT, "row")
        },
        **{name: [_values(getattr(rollout, name)) for rollout in rollouts] for name in _OF_TOKENS},
        "session": [one.session and json.dumps(asdict(one.session), **AS_TEXT) for one in rollouts],
        **{
            name: [getattr(one, name) for one in scored]
            for name in ("reward", "error", "verdict", "text")
        },
        "prompt_id": [rollout.prompt.id for rollout in rollouts],
        "prompt": [rollout.prompt.text for rollout in rollouts],
        "prompt_token_ids": [rollout.prompt.token_ids for rollout in rollouts],
        "token_ids": _lists([rollout.token_ids for rollout in rollouts], lengths, np.int32),
        "sampler_logprobs": _lists([rollout.logprobs for rollout in rollouts], lengths, np.float32),
        "loss_mask": _lists([rollout.loss_mask for rollout in rollouts], lengths, np.bool_),
    }


def _values(values: Any) -> np.ndarray | None:
    """Return the values as an array that Arrow reads without an object for each."""
    return None if values is None else np.asarray(values)


def _computed(lengths: np.ndarray, top_sizes: np.ndarray, columns: Columns) -> JsonObject:
    """Return the columns that the step computed, for all rows."""
    nothing = [None] * len(lengths)
    advantages_B = columns.get("advantages_B")
    pieces = columns.get("pieces", {})
    return {
        "pieces": [pieces.get(place) for place in range(len(lengths))],
        "truth": [
            truth if isinstance(truth, str | None) else json.dumps(truth, **AS_TEXT)
            for truth in columns.get("truths", nothing)
        ],
        "prox_logprobs": _responses(columns.get("prox_logprobs_N"), lengths),
        "top_prox_logprobs": _responses(columns.get("top_prox_logprobs_E"), top_sizes),
        "weights": _responses(columns.get("weights_N"), lengths),
        "kept": _responses(columns.get("mask_N"), lengths),
        "advantage": nothing if advantages_B is None else advantages_B.tolist(),
    }


def session_of(text: str | None) -> Session | None:
    if not text:
        return None
    return msgspec.convert(json.loads(text), Session)


def read_rollouts(path: Path) -> pa.Table:
    return pq.read_table(path)


@dataclass(frozen=True)
class Recorded:
    """A step's batch before any correction."""

    scored: list[Scored]
    batch: Batch
    prox_logprobs_N: Tensor | None  # None where the step made none
    top_prox_logprobs_E: Tensor | None  # None where it read none
    # applied; NaN where the correction dropped the token, None where none were recorded
    weights_N: Tensor | None
    version: int  # the learner's before the step


def load_recorded(path: Path) -> Recorded:
    from megatron_rl.batch import collate

    table = read_rollouts(path)
    for name in set(NEW) - set(table.column_names):
        table = table.append_column(
            SCHEMA.field(name), pa.nulls(len(table), SCHEMA.field(name).type)
        )
    if missing := set(SCHEMA.names) - set(table.column_names):
        raise ValueError(f"{path}: recorded by an earlier version, without {sorted(missing)[0]}")
    lists = {name: arrays(table, name) for name in LISTS}
    rows = table.select([name for name in table.column_names if name not in LISTS]).to_pylist()
    scored = [
        _scored(row, {name: lists[name][at] for name in _ANSWER}) for at, row in enumerate(rows)
    ]
    batch = collate(scored)
    version = int(batch.token_versions_N.max())
    if step := STEP.fullmatch(path.name):
        version = int(step[1]) - 1
    weights_N = _joined(lists["weights"], "float32")
    kept_N = _joined(lists["kept"], "bool")
    if weights_N is not None and kept_N is not None:
        weights_N = weights_N.where(kept_N, math.nan)
    prox_N, top_prox_E = (
        _joined(lists[name], "float32") for name in ("prox_logprobs", "top_prox_logprobs")
    )
    return Recorded(scored, batch, prox_N, top_prox_E, weights_N, version)


def _joined(rows: Sequence[Any], kind: str) -> Tensor | None:
    """The rows one after another; None if one is missing."""
    from megatron_rl.batch import joined

    if any(row is None for row in rows):
        return None
    return joined(rows, kind)


def arrays(table: pa.Table, name: str) -> list[Any]:
    """A column of lists, each an array; none where a row has none."""
    return [
        row.values.to_numpy(zero_copy_only=False) if row.is_valid else None
        for row in table.column(name)
    ]


def _scored(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Scored:
    """The response given to `write_rollouts`; of the data set's row the truth alone is recorded."""
    rollout = Rollout(
        prompt=Prompt(row["prompt_id"], tuple(row["prompt_token_ids"]), text=row["prompt"], row={}),
        logprobs=answer["sampler_logprobs"],
        **{name: answer[name] for name in _ANSWER if name != "sampler_logprobs"},
        **{name: row[name] for name in (*_OF_ROLLOUT, "row")},
        session=session_of(row["session"]),
    )
    verdict = row["verdict"]
    return Scored(
        rollout, row["reward"], row["error"], row["text"], Verdict(verdict) if verdict else None
    )


def recorded_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) in the order of steps."""
    names = ((STEP.fullmatch(path.name), path) for path in folder.glob("step_*.parquet"))
    return sorted((int(name[1]), path) for name, path in names if name)


def _responses(values_N: Tensor | None, lengths: np.ndarray) -> pa.Array:
    if values_N is None:
        return pa.nulls(len(lengths))
    values = values_N.numpy(force=True)
    return _lists([values], lengths, values.dtype)


def _lists(rows: Sequence[Any], lengths: np.ndarray, kind: Any) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    flat = np.concatenate([np.zeros(0, kind), *rows], dtype=kind, casting="unsafe")
    if len(flat) != ends[-1]:
        raise ValueError(f"{len(flat)} values for {ends[-1]} tokens")
    return pa.ListArray.from_arrays(ends, pa.array(flat))
