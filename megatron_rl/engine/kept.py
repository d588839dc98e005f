"""Which tokens top_k and top_p left to draw from, told from logprobs that were taken after them: what they cut is -inf.

An engine keeps what ties with the last of the k, so that a few more candidates than k are asked for. Where all of those
are finite there may be more, and the position is as good as unknown.

T tokens of an answer, N candidates of a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Kept:
    """Of one answer."""

    ids: array[int]  # token after token
    counts: array[int]  # of each token; one that is not known has itself alone
    unknown_T: np.ndarray


def of_rows(tokens_T: np.ndarray, ids_TN: np.ndarray, logprobs_TN: np.ndarray, candidates: int) -> Kept:
    """Rows as an embedded engine has them: the sampled token, then the candidates, it among them."""
    return _checked(tokens_T, ids_TN[:, 1:], np.isfinite(logprobs_TN[:, 1:]), candidates)


def of_lists(
    tokens: Sequence[int], found: Iterable[Sequence[tuple[int, float]]], missing: float, candidates: int
) -> Kept:
    """Candidates as a server has them, each once; `missing` stands for -inf."""
    rows = list(found)
    width = max([1, *map(len, rows)])
    ids_TN, kept_TN = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), bool)
    for at, row in enumerate(rows):
        ids_TN[at, : len(row)] = [token for token, _ in row]
        kept_TN[at, : len(row)] = [logprob > missing for _, logprob in row]
    return _checked(np.asarray(tokens, np.int32), ids_TN, kept_TN, candidates)


def _checked(tokens_T: np.ndarray, ids_TN: np.ndarray, kept_TN: np.ndarray, candidates: int) -> Kept:
    drawn_T = (kept_TN & (ids_TN == tokens_T[:, None])).any(axis=1)
    unknown_T = ~drawn_T | (kept_TN.sum(axis=1) >= candidates)
    ids_TN, kept_TN = ids_TN.copy(), kept_TN.copy()
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    kept_TN[unknown_T] = np.arange(kept_TN.shape[1]) == 0
    counts_T = kept_TN.sum(axis=1)
    ids_K = ids_TN[kept_TN].astype(np.int32)
    return Kept(array("i", ids_K.tobytes()), array("i", counts_T.astype(np.int32).tobytes()), unknown_T)
