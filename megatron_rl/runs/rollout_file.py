"""rollouts/step_N.parquet: the rollouts that a step was trained on, one row each, with both engines' logprobs.

Lists have the length of the response. Columns that a step does not have (no prox forward, no weights)
are null. Shape suffixes: B sequences, T response positions (right-padded).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import pyarrow as pa
import pyarrow.parquet as pq

from megatron_rl.files import replacing
from megatron_rl.types import Batch, Prompt, Rollout, Scored, collate, padded

if TYPE_CHECKING:
    import torch

STEP = re.compile(r"step_([0-9]+)\.parquet")
SCHEMA = pa.schema(
    [
        ("prompt_id", pa.int64()),
        ("group", pa.int64()),
        ("sample", pa.int32()),
        ("policy_version", pa.int64()),
        ("finish_reason", pa.string()),
        ("format", pa.string()),  # weight format of the engine that answered
        ("reward", pa.float32()),
        ("error", pa.string()),
        ("text", pa.string()),  # the answer
        ("prompt", pa.string()),
        ("truth", pa.string()),  # the data set's own solution, as JSON where it is no text
        ("prompt_token_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("sampler_logprobs", pa.list_(pa.float32())),  # NaN where the sampler reported none
        ("loss_mask", pa.list_(pa.bool_())),  # what the policy wrote itself
        ("prox_logprobs", pa.list_(pa.float32())),
        ("weights", pa.list_(pa.float32())),  # applied by rollout_correction
        ("kept", pa.list_(pa.bool_())),  # the mask after rollout_correction
        ("advantage", pa.float32()),
    ]
)


class Columns(TypedDict, total=False):
    """What the step computed about its rollouts; whatever is left out is null in the file."""

    prox_logprobs_BT: torch.Tensor | None
    weights_BT: torch.Tensor | None
    mask_BT: torch.Tensor | None
    advantages_B: torch.Tensor | None
    truths: Sequence[Any]  # the data set's own solutions


def write_rollouts(path: Path, scored: Sequence[Scored], **columns: Unpack[Columns]) -> None:
    lengths = [len(one.rollout.token_ids) for one in scored]
    rollouts = [one.rollout for one in scored]
    advantages_B = columns.get("advantages_B")
    table = {
        "prompt_id": [rollout.prompt.id for rollout in rollouts],
        "group": [rollout.group for rollout in rollouts],
        "sample": [rollout.sample for rollout in rollouts],
        "policy_version": [rollout.policy_version for rollout in rollouts],
        "finish_reason": [rollout.finish_reason for rollout in rollouts],
        "format": [rollout.format for rollout in rollouts],
        "reward": [one.reward for one in scored],
        "error": [one.error for one in scored],
        "text": [one.text for one in scored],
        "prompt": [rollout.prompt.text for rollout in rollouts],
        "truth": [None if truth is None else _as_text(truth) for truth in columns.get("truths", [None] * len(scored))],
        "prompt_token_ids": [rollout.prompt.token_ids for rollout in rollouts],
        "token_ids": [rollout.token_ids for rollout in rollouts],
        "sampler_logprobs": [rollout.logprobs for rollout in rollouts],
        "loss_mask": [rollout.loss_mask for rollout in rollouts],
        "prox_logprobs": _rows(columns.get("prox_logprobs_BT"), lengths, "prox_logprobs_BT"),
        "weights": _rows(columns.get("weights_BT"), lengths, "weights_BT"),
        "kept": _rows(columns.get("mask_BT"), lengths, "mask_BT"),
        "advantage": [None] * len(scored) if advantages_B is None else advantages_B.tolist(),
    }
    with replacing(path) as partial:
        pq.write_table(pa.table(table, schema=SCHEMA), partial, compression="zstd")


def read_rollouts(path: Path) -> pa.Table:
    return pq.read_table(path)


@dataclass(frozen=True)
class Recorded:
    """One step's batch, as it was before any correction."""

    scored: list[Scored]
    batch: Batch
    prox_logprobs_BT: torch.Tensor | None  # None where the step made none


def load_recorded(path: Path) -> Recorded:
    import torch

    rows = read_rollouts(path).to_pylist()
    scored, prox = [_scored(row) for row in rows], [row["prox_logprobs"] for row in rows]
    return Recorded(scored, collate(scored), None if None in prox else padded(prox, torch.float32))


def _scored(row: Mapping[str, Any]) -> Scored:
    """What `write_rollouts` was given; of the data set's row, the file holds the truth alone."""
    rollout = Rollout(
        prompt=Prompt(row["prompt_id"], tuple(row["prompt_token_ids"]), text=row.get("prompt") or "", row={}),
        token_ids=tuple(row["token_ids"]),
        logprobs=tuple(row["sampler_logprobs"]),
        loss_mask=tuple(row["loss_mask"]),
        format=row.get("format") or "",  # not in the files of old runs
        **{name: row[name] for name in ("group", "sample", "finish_reason", "policy_version")},
    )
    return Scored(rollout, row["reward"], row["error"], row["text"])


def recorded_steps(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) in the order of steps."""
    names = ((STEP.fullmatch(path.name), path) for path in folder.glob("step_*.parquet"))
    return sorted((int(name[1]), path) for name, path in names if name)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _rows(values_BT: torch.Tensor | None, lengths: Sequence[int], name: str) -> list[list[float] | None]:
    if values_BT is None:
        return [None] * len(lengths)
    if len(values_BT) != len(lengths) or (lengths and max(lengths) > values_BT.shape[1]):
        raise ValueError(
            f"{name} has shape {tuple(values_BT.shape)} for {len(lengths)} rollouts of up to {max(lengths)} tokens"
        )
    return [row_T[:length].tolist() for row_T, length in zip(values_BT, lengths, strict=True)]
