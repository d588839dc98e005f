"""Top tokens and sampling supports from vLLM's arrays."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_rl.engine import candidates as module
from megatron_rl.engine.candidates import CandidateRequest, Candidates

INF = math.inf
NAN = math.nan
LOGS = np.log([0.5, 0.3, 0.15, 0.05]).tolist()


def columns(request: CandidateRequest, steps: list[tuple[int, Any, Any]]) -> dict[str, np.ndarray]:
    """Of steps with a sampled token each, ids and logprobs with the sampled one's first."""
    held = Candidates(request)
    for token, ids, logprobs in steps:
        reported = ids and SimpleNamespace(
            # as wide as the widest request of the batch
            logprob_token_ids=np.array([[*ids, 99]]),
            logprobs=np.array([[*logprobs, -50.0]], np.float32),
        )
        held.add([token], reported)
    return held.columns()


def top(found: dict[str, np.ndarray]) -> list[tuple[list[int], list[float]]]:
    ends = np.cumsum(found["top_counts"])[:-1]
    assert found["top_ids"].dtype == np.int32
    assert found["top_counts"].dtype == np.int16
    assert found["top_logprobs"].dtype == np.float16
    return [
        (ids.tolist(), logprobs.tolist())
        for ids, logprobs in zip(
            np.split(found["top_ids"], ends), np.split(found["top_logprobs"], ends), strict=True
        )
    ]


@pytest.mark.parametrize(
    ("mass", "count"),
    [(0.4, 1), (0.5 - 1e-6, 1), (0.6, 2), (0.9, 3), (0.999, 4), (1.0, 4)],
)
def test_as_many_tokens_as_hold_the_mass(mass: float, count: int) -> None:
    step = (8, [8, 7, 3, 9, 8], [LOGS[3], *LOGS])
    found = columns(CandidateRequest(top=4, mass=mass), [step])
    ((ids, logprobs),) = top(found)
    assert ids == [7, 3, 9, 8][:count]
    assert logprobs == np.float16(LOGS[:count]).tolist()
    assert found["logprobs"].tolist() == np.float32(LOGS[3:]).tolist()
    assert "kept_ids" not in found


def test_a_sampled_token_may_be_in_the_tail() -> None:
    ((ids, _),) = top(columns(CandidateRequest(top=2), [(8, [8, 7, 3], [-9.0, *LOGS[:2]])]))
    assert ids == [7, 3]


@pytest.mark.parametrize(
    "step",
    [
        (7, None, None),
        (7, [9, 9, 3], [-0.1, -0.1, -3.0]),  # the logprob of another token
        (7, [7, 9, 3], [NAN, NAN, NAN]),
    ],
)
def test_without_a_logprob_there_is_the_sampled_token_alone(step: Any) -> None:
    known = (3, [3, 9, 3], [-0.7, -0.7, -0.8])
    found = columns(CandidateRequest(top=2), [known, step, known])
    first, (ids, logprobs), last = top(found)
    assert first == last == ([9, 3], np.float16([-0.7, -0.8]).tolist())
    assert ids == [7]
    assert math.isnan(logprobs[0])
    assert np.isnan(found["logprobs"]).tolist() == [False, True, False]


@pytest.mark.parametrize("support", [2, 3, 4, 6])
def test_top_tokens_lie_inside_the_sampling_support(support: int) -> None:
    """Also where more or fewer of them are requested than candidates of the support."""
    drawn = [7, 3, 9, 8, 5, 6]
    kept = (9, [9, *drawn], [LOGS[2], *np.log([0.55, 0.3, 0.15]), -INF, -INF, -INF])
    tied = (6, [6, *drawn], [math.log(1 / 6)] * 7)
    found = columns(CandidateRequest(support, top=4, mass=1.0), [kept, tied])
    counts = found["kept_counts"].tolist()
    known, (ids, logprobs) = top(found)
    assert ids == [6], "a support that is not known"
    assert math.isnan(logprobs[0])
    if support > 3:
        assert counts == [3, 1]
        assert known[0] == drawn[:3] == found["kept_ids"][:3].tolist()
    else:
        assert counts == [1, 1]
        assert known[0] == [9]
        assert np.isnan(found["logprobs"]).all()


def test_a_long_response_is_reduced_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    steps = []
    for _ in range(23):
        ids = draw.permutation(50)[:6].tolist()
        logprobs = np.sort(np.log(draw.dirichlet([0.3] * 7))[:6])[::-1].tolist()
        steps.append((ids[2], [ids[2], *ids], [logprobs[2], *logprobs]))
    request = CandidateRequest(6, top=5, mass=0.8)
    wanted = columns(request, steps)
    for entries in (1, 30, 23 * 7):
        monkeypatch.setattr(module, "ENTRIES", entries)
        found = columns(request, steps)
        for name, column in wanted.items():
            np.testing.assert_array_equal(found[name], column)
    assert columns(request, [])["top_ids"].tolist() == []


def test_a_token_without_probability_is_no_top_token() -> None:
    """Such as at a low temperature, where float16 would round the logprob to -inf."""
    step = (7, [7, 7, 3, 9], [0.0, 0.0, -200.0, -90_000.0])
    ((ids, logprobs),) = top(columns(CandidateRequest(top=3, mass=1.0), [step]))
    assert (ids, logprobs) == ([7], [0.0])
