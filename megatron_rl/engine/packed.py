"""What vLLM's answers look like on their way to the parent: columns, not objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_rl.engine.kept import of_rows


def pack(completions: list[Any], candidates: int = 0) -> dict[str, Any]:
    """Columns instead of objects: lengths, then all tokens and logprobs back to back; NaN where there is none."""
    if candidates:
        return _pack_kept(completions, candidates)
    lengths = [len(completion.token_ids) for completion in completions]
    tokens = np.empty(sum(lengths), dtype=np.int32)
    logprobs = np.full(sum(lengths), np.nan, dtype=np.float32)
    start = 0
    for completion, length in zip(completions, lengths, strict=True):
        stop = start + length
        tokens[start:stop] = completion.token_ids
        flat = completion.logprobs
        if flat is not None and flat.token_ids == list(completion.token_ids):
            logprobs[start:stop] = flat.logprobs
        elif flat is not None:
            logprobs[start:stop] = [sampled(flat[i], token) for i, token in enumerate(completion.token_ids)]
        start = stop
    return {
        "lengths": lengths,
        "tokens": tokens.tobytes(),
        "logprobs": logprobs.tobytes(),
        "finish": [completion.finish_reason or "abort" for completion in completions],
    }


def _pack_kept(completions: list[Any], candidates: int) -> dict[str, Any]:
    """With the tokens that each was drawn among; a logprob counts as missing where those are not known."""
    logprobs, found = [], []
    for completion in completions:
        tokens_T = np.asarray(completion.token_ids, np.int32)
        flat = completion.logprobs
        ids_TN = np.asarray(flat.token_ids, np.int32).reshape(len(tokens_T), candidates + 1)
        logprobs_TN = np.asarray(flat.logprobs, np.float32).reshape(ids_TN.shape)
        found.append(of_rows(tokens_T, ids_TN, logprobs_TN, candidates))
        logprobs.append(np.where(found[-1].unknown_T, np.float32("nan"), logprobs_TN[:, 0]))
    return {
        "lengths": [len(completion.token_ids) for completion in completions],
        "tokens": np.concatenate([np.asarray(one.token_ids, np.int32) for one in completions]).tobytes(),
        "logprobs": np.concatenate(logprobs).astype(np.float32).tobytes(),
        "finish": [completion.finish_reason or "abort" for completion in completions],
        "kept_ids": [one.ids.tobytes() for one in found],
        "kept_counts": [one.counts.tobytes() for one in found],
    }


def sampled(position: dict[int, Any] | None, token: int) -> float:
    entry = position.get(token) if position else None
    return float("nan") if entry is None else entry.logprob


def versions(completions: Sequence[Any], now: int) -> dict[str, Any]:
    """Of the first token of each; `spans`: version and tokens, one after the other, of those with more than one.

    `now`: of an answer without a token.
    """
    told = [[(int(span.version), span.end - span.start) for span in one.weight_versions or ()] for one in completions]
    return {
        "versions": [spans[0][0] if spans else now for spans in told],
        "spans": {row: spans for row, spans in enumerate(told) if len(spans) > 1},
    }
