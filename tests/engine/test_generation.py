"""What top_k and top_p have kept, as an engine tells it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np

from megatron_rl.engine.generation import drawn_among

INF = math.inf
# drawn token, then candidates and their logprobs, and what it was drawn among
CASES = [
    (7, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (3, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (7, [7, 3, 9], [0.0, -INF, -INF], [7]),
    (9, [7, 3, 9], [-1.0, -1.0, -1.1], None),  # all are finite: there may be more that tie with the last one
    (4, [7, 3, 9], [-1.0, -1.0, -1.0], None),  # drawn among ties that were not told
    (4, [7, 3, 9], [-1.0, -INF, -INF], None),  # an engine that contradicts itself
]


def test_what_each_token_was_drawn_among() -> None:
    first = [dict(zip(ids, of, strict=True)).get(drawn, -1.0) for drawn, ids, of, _ in CASES]
    flat = SimpleNamespace(
        token_ids=[token for drawn, ids, *_ in CASES for token in (drawn, *ids)],
        logprobs=[one for own, (_, _, of, _) in zip(first, CASES, strict=True) for one in (own, *of)],
    )
    found, counts_T, logprobs_T = drawn_among(flat, np.array([case[0] for case in CASES], np.int32), candidates=3)
    ids = found.tolist()
    for (drawn, *_, kept), count, own, logprob in zip(CASES, counts_T, first, logprobs_T, strict=True):
        assert sorted(ids[:count]) == sorted(kept or [drawn])
        assert math.isnan(logprob) if kept is None else logprob == own
        del ids[:count]
    assert not ids


def test_no_answer() -> None:
    ids_K, counts_T, logprobs_T = drawn_among(SimpleNamespace(token_ids=[], logprobs=[]), np.array([], np.int32), 3)
    assert len(ids_K) == len(counts_T) == len(logprobs_T) == 0
