"""Samples from the steps of vLLM's core; the candidates that top_k and top_p have kept."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine.generation import Sample, drawn_among

INF = math.inf
NAN = math.nan
# drawn token, then candidates and their logprobs, and what it was drawn among
CASES = [
    (7, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (3, [7, 3, 9], [-0.5, -1.0, -INF], [7, 3]),
    (7, [7, 3, 9], [0.0, -INF, -INF], [7]),
    (
        9,
        [7, 3, 9],
        [-1.0, -1.0, -1.1],
        None,
    ),  # all are finite: there may be more that tie with the last one
    (4, [7, 3, 9], [-1.0, -1.0, -1.0], None),  # drawn among ties that were not told
    (4, [7, 3, 9], [-1.0, -INF, -INF], None),  # an engine that contradicts itself
]
FIRST = [dict(zip(ids, of, strict=True)).get(drawn, -1.0) for drawn, ids, of, _ in CASES]
DRAWN_T = np.array([case[0] for case in CASES], np.int32)


def rows(dtype: Any = np.int32) -> list[tuple[np.ndarray, np.ndarray]]:
    return [
        (np.array([[drawn, *ids]], dtype), np.array([[own, *of]], np.float32))
        for own, (drawn, ids, of, _) in zip(FIRST, CASES, strict=True)
    ]


def output(tokens: list[int], told: tuple[np.ndarray, np.ndarray] | None) -> SimpleNamespace:
    named = told and SimpleNamespace(logprob_token_ids=told[0], logprobs=told[1])
    return SimpleNamespace(new_token_ids=tokens, new_logprobs=named, routed_experts=None)


def numbers(answer: dict[str, Any], name: str, kind: Any) -> list[Any]:
    return np.frombuffer(answer[name], kind).tolist()


def check(ids: list[int], counts: list[int], logprobs: list[float]) -> None:
    for (drawn, *_, kept), count, own, logprob in zip(CASES, counts, FIRST, logprobs, strict=True):
        assert sorted(ids[:count]) == sorted(kept or [drawn])
        assert math.isnan(logprob) if kept is None else logprob == own
        del ids[:count]
    assert not ids


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_what_each_token_was_drawn_among(dtype: Any) -> None:
    ids_K, counts_T, logprobs_T = drawn_among(rows(dtype), DRAWN_T, candidates=3)
    check(ids_K.tolist(), counts_T.tolist(), logprobs_T.tolist())


def test_a_sample_of_candidates_holds_nothing_of_its_batch() -> None:
    """Each step's arrays are of the whole batch, and as wide as its widest request."""
    sample = Sample(5, 3, {})
    for (ids, of), drawn in zip(rows(), DRAWN_T.tolist(), strict=True):
        wide = np.pad(ids, ((2, 0), (0, 4))), np.pad(of, ((2, 0), (0, 4)))
        sample.take(output([drawn], (wide[0][2:], wide[1][2:])), 0)
        wide[0].fill(0)  # the buffers are used again
        wide[1].fill(0)
    answer = sample.completed("stop", 0)
    check(
        *(
            numbers(answer, *one)
            for one in (("kept_ids", "i4"), ("kept_counts", "i4"), ("logprobs", "f4"))
        )
    )


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
    sample = Sample(5, 0, {})
    for tokens, told in steps:
        sample.take(output(tokens, told and (np.array(told[0]), np.array(told[1]))), 3)
    found = sample.completed("stop", 4)
    written = [token for tokens, _ in steps for token in tokens]
    assert numbers(found, "tokens", "i4") == written
    np.testing.assert_array_equal(numbers(found, "logprobs", "f4"), np.float32(logprobs))
    assert (found["finish"], found["spans"]) == (
        "stop",
        [(3, len(written))] if written else [(4, 0)],
    )


def test_the_policy_versions_of_an_answer() -> None:
    sample = Sample(5, 0, {})
    for token, version in ((4, 2), (5, 3), (6, 3)):
        sample.take(output([token], None), version)
    assert sample.completed("abort", 3)["spans"] == [(2, 1), (3, 2)]


def test_experts_that_a_device_engine_tells_step_by_step_come_with_the_answer() -> None:
    """vLLM tells those of what a step has read, [tokens, layers, experts of a token]."""
    sample = Sample(5, 0, {"tokens": [1, 2, 3]})
    steps = [np.arange(12, dtype=np.uint8).reshape(3, 2, 2), np.full((1, 2, 2), 7, np.uint8)]
    for token, experts in zip((4, 5), steps, strict=True):
        told = output([token], None)
        told.routed_experts = experts
        sample.take(told, 0)
    shape, content = sample.told_experts()
    assert shape == (2, 2) and content == np.concatenate(steps).tobytes()
    assert Sample(6, 0, {"tokens": [1]}).told_experts() == ((0, 0), b"")
