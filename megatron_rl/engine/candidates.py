"""Candidates of a sample's tokens: the most likely tokens at each, from vLLM's arrays. The sampling
support and the top tokens are derived from them.

Logprobs are taken after filtering: tokens that top_k and top_p remove have -inf. An engine keeps
ties with the k-th token, so that a few more candidates than k are requested. If all of those are
finite there may be more, and the support of that position is unknown.

T tokens of a response, N candidates of a token.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

ENTRIES = 1 << 13  # candidates of a sample that are held before they are reduced


@dataclass(frozen=True)
class CandidateRequest:
    """Numbers of candidates of each token, and the use of them."""

    support: int = 0  # candidates that show the sampling support; 0: not requested
    top: int = 0  # maximum number of top tokens; 0: none
    mass: float = 1.0  # probability beyond which there are no more top tokens

    @property
    def count(self) -> int:
        return max(self.support, self.top)


class Candidates:
    """Candidates of one sample. They are copied, as vLLM returns views of the batch's arrays, and
    reduced from time to time: a long response would take 8 bytes for each.
    """

    def __init__(self, request: CandidateRequest) -> None:
        self._request = request
        width = request.count + 1  # the sampled token first
        rows = max(1, ENTRIES // width)
        self._ids = np.empty((rows, width), np.int32)
        self._logprobs = np.empty((rows, width), np.float32)
        self._tokens = np.empty(rows, np.int32)
        self._held = 0
        self._reduced: list[dict[str, np.ndarray]] = []

    def add(self, tokens: list[int], reported: Any) -> None:
        """Add the candidates of a step's tokens; `reported`: vLLM's logprobs, None if missing."""
        width = self._ids.shape[1]
        for place, token in enumerate(tokens):
            row = self._held
            self._tokens[row] = token
            if reported is None:
                self._ids[row] = token
                self._logprobs[row] = np.nan
            else:
                self._ids[row] = reported.logprob_token_ids[place, :width]
                self._logprobs[row] = reported.logprobs[place, :width]
            self._held += 1
            if self._held == len(self._ids):
                self._reduce()

    def columns(self) -> dict[str, np.ndarray]:
        """Return the completion's columns: logprobs, sampling support, top tokens."""
        self._reduce()
        first = self._reduced[0]
        return {name: np.concatenate([part[name] for part in self._reduced]) for name in first}

    def _reduce(self) -> None:
        """Reduce the candidates held to the columns of their tokens."""
        ids_TN = self._ids[: self._held]
        logprobs_TN = self._logprobs[: self._held]
        tokens_T = self._tokens[: self._held]
        logprobs_T = np.where(ids_TN[:, 0] == tokens_T, logprobs_TN[:, 0], np.float32("nan"))
        request = self._request
        found: dict[str, np.ndarray] = {}
        if request.support:
            part = np.s_[:, 1 : request.support + 1]
            support = sampling_support(ids_TN[part], logprobs_TN[part], tokens_T, logprobs_T)
            found = dict(zip(("kept_ids", "kept_counts", "logprobs"), support, strict=True))
            logprobs_T = found["logprobs"]
        if request.top:
            part = np.s_[:, 1 : request.top + 1]
            top = top_tokens(ids_TN[part], logprobs_TN[part], tokens_T, logprobs_T, request.mass)
            found |= dict(zip(("top_ids", "top_counts", "top_logprobs"), top, strict=True))
        self._reduced.append({"logprobs": logprobs_T, **found})
        self._held = 0


def sampling_support(
    ids_TN: np.ndarray, logprobs_TN: np.ndarray, tokens_T: np.ndarray, logprobs_T: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the sampling support: candidates of each token, token after token; their number for
    each token; its logprob.

    The sampled token is among its candidates. A position with unknown support has only the sampled
    token, and no logprob.
    """
    kept_TN = np.isfinite(logprobs_TN)
    drawn_T = (kept_TN & (ids_TN == tokens_T[:, None])).any(axis=1)
    unknown_T = ~drawn_T | kept_TN.all(axis=1)
    kept_TN[unknown_T] = np.arange(kept_TN.shape[1]) == 0
    ids_TN = ids_TN.copy()
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    counts_T = kept_TN.sum(axis=1, dtype=np.int32)
    return ids_TN[kept_TN], counts_T, np.where(unknown_T, np.float32("nan"), logprobs_T)


def top_tokens(
    ids_TN: np.ndarray,
    logprobs_TN: np.ndarray,
    tokens_T: np.ndarray,
    logprobs_T: np.ndarray,
    mass: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the top tokens: of each token the first candidates that together hold this mass; their
    number for each token; their logprobs in float16.

    Candidates come most likely first. Where they are unknown, the sampled token is the only one,
    with a logprob of NaN if that is missing.
    """
    shares_TN = np.exp(logprobs_TN)
    before_TN = shares_TN.cumsum(axis=1, dtype=np.float64) - shares_TN
    # a token outside the sampling support has no probability
    top_TN = (before_TN < mass) & (shares_TN > 0)
    unknown_T = np.isnan(logprobs_T) | ~top_TN[:, 0]
    top_TN[unknown_T] = np.arange(top_TN.shape[1]) == 0
    ids_TN = ids_TN.copy()
    ids_TN[unknown_T, 0] = tokens_T[unknown_T]
    logprobs_TN = logprobs_TN.copy()
    logprobs_TN[unknown_T, 0] = logprobs_T[unknown_T]
    counts_T = top_TN.sum(axis=1, dtype=np.int16)
    return ids_TN[top_TN], counts_T, logprobs_TN[top_TN].astype(np.float16)
