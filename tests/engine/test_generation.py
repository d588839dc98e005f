"""Samples from the steps of vLLM's core; the candidates that top_k and top_p have kept."""

import math
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine.candidates import CandidateRequest
from megatron_rl.engine.generation import Sample

INF = math.inf
NAN = math.nan
# drawn token, then candidates and their logprobs, and what it was drawn among
CASES = [
    (7, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (3, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (7, [7, 3, 9], [0.0, -INF, -INF], [7]),
    # all are finite: there may be more that tie with the last one
    (9, [7, 3, 9], [-1.0, -1.0, -1.1], None),
    (4, [7, 3, 9], [-1.0, -1.0, -1.0], None),  # drawn among ties that were not reported
    (4, [7, 3, 9], [-1.0, -INF, -INF], None),  # an engine that contradicts itself
]


def output(tokens: list[int], candidates: tuple[np.ndarray, np.ndarray] | None) -> SimpleNamespace:
    named = candidates and SimpleNamespace(logprob_token_ids=candidates[0], logprobs=candidates[1])
    return SimpleNamespace(new_token_ids=tokens, new_logprobs=named, routed_experts=None)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_sample_of_candidates_holds_nothing_of_its_batch(dtype: Any) -> None:
    """Each step's arrays are of the whole batch, and as wide as its widest request."""
    sample = Sample(5, CandidateRequest(3), {})
    own = []
    for drawn, ids, logprobs, _ in CASES:
        own.append(dict(zip(ids, logprobs, strict=True)).get(drawn, -1.0))
        ids_K = np.array([[0, 0, drawn, *ids, 0]], dtype)
        logprobs_K = np.array([[0, 0, own[-1], *logprobs, 0]], np.float32)
        sample.take(output([drawn], (ids_K[:, 2:], logprobs_K[:, 2:])), 0)
        ids_K.fill(0)  # the buffers are used again
        logprobs_K.fill(0)
    answer = sample.completed("stop", 0)
    kept = iter(answer.kept_ids or ())
    counts = answer.kept_counts or ()
    found = answer.logprobs
    for (drawn, *_, wanted), count, first, logprob in zip(CASES, counts, own, found, strict=True):
        assert sorted(islice(kept, count)) == sorted(wanted or [drawn])
        assert math.isnan(logprob) if wanted is None else logprob == first
    assert not list(kept)


@pytest.mark.parametrize(
    ("steps", "logprobs"),
    [
        ([([5], ([[5]], [[-0.5]])), ([6], ([[6]], [[-1.5]]))], [-0.5, -1.5]),
        ([([7], ([[9, 7]], [[-9.0, -2.0]]))], [NAN]),  # of another token than was drawn
        ([([5, 6], ([[5], [6]], [[-0.5], [-1.5]]))], [-0.5, -1.5]),  # two in a step
        ([([4], None)], [NAN]),
        ([([], None)], []),
    ],
)
def test_a_sample_keeps_its_tokens_logprobs_and_what_is_missing_is_marked(
    steps: Any, logprobs: list[float]
) -> None:
    sample = Sample(5, CandidateRequest(), {})
    for tokens, reported in steps:
        candidates = reported and (np.array(reported[0]), np.array(reported[1]))
        sample.take(output(tokens, candidates), 3)
    found = sample.completed("stop", 4)
    written = [token for tokens, _ in steps for token in tokens]
    assert list(found.token_ids) == written
    np.testing.assert_array_equal(found.logprobs, np.float32(logprobs))
    version = 3 if written else 4
    assert (found.finish_reason, found.policy_version, found.versions) == ("stop", version, None)
