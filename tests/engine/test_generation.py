"""What top_k and top_p have kept, as engines and servers tell it."""

from __future__ import annotations

import math

import numpy as np

from megatron_rl.engine.generation import Kept, of_lists, of_rows

INF = math.inf
# drawn token, then candidates (embedded: as rows with the drawn one in front) and their logprobs
CASES = [
    (7, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (3, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (7, [7, 3, 9], [0.0, -INF, -INF], [7]),
    (9, [7, 3, 9], [-1.0, -1.0, -1.1], None),  # all are finite: there may be more that tie with the last one
    (4, [7, 3, 9], [-1.0, -1.0, -1.0], None),  # drawn among ties that were not told
    (4, [7, 3, 9], [-1.0, -INF, -INF], None),  # an engine that contradicts itself
]


def check(found: Kept) -> None:
    ids = list(found.ids)
    for (drawn, *_, kept), count, unknown in zip(CASES, found.counts, found.unknown_T, strict=True):
        assert unknown == (kept is None)
        assert sorted(ids[:count]) == sorted(kept or [drawn])
        del ids[:count]
    assert not ids


def test_of_an_embedded_engine() -> None:
    drawn_T = np.array([case[0] for case in CASES], np.int32)
    ids_TN = np.array([[drawn, *ids] for drawn, ids, *_ in CASES], np.int32)
    logprobs_TN = np.array([[dict(zip(ids, of, strict=True)).get(drawn, -1.0), *of] for drawn, ids, of, _ in CASES])
    check(of_rows(drawn_T, ids_TN, logprobs_TN, candidates=3))


def test_of_a_server() -> None:
    """It sends each token once, the drawn one first, as many as were asked for."""
    lists = []
    for drawn, ids, logprobs, _ in CASES:
        told = dict(zip(ids, (max(one, -9999.0) for one in logprobs), strict=True))
        first = {drawn: told.get(drawn, -1.0)}
        lists.append(list((first | told).items())[:3])
    lists[-1] = [(7, -1.0), (3, -9999.0)]
    check(of_lists([case[0] for case in CASES], lists, -9999.0, candidates=3))


def test_no_answer_and_no_candidates() -> None:
    nothing = of_lists([], [], -9999.0, candidates=3)
    assert not nothing.ids and not nothing.counts
    missing = of_lists([5, 6], [[], []], -9999.0, candidates=3)
    assert list(missing.ids) == [5, 6] and missing.unknown_T.all()
