"""Logprobs of the learner's pass over a conversation's row: equal to the engine's in each turn.

All of it happens in one process (`turn_cases.py`), in which the learner may change torch.
"""

from pathlib import Path
from typing import Any

import pytest
from preloaded import found_by

from megatron_rl.config.schema import Format, Forward

pytestmark = pytest.mark.engine
SESSIONS = 3
TURNS = 4


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    script = Path(__file__).with_name("turn_cases.py")
    return found_by("megatron", script, tmp_path_factory.mktemp("turns"), timeout=400.0)


@pytest.mark.parametrize(
    ("place", "format", "forward"),
    [
        *((place, Format.none, Forward.bf16) for place in (0, 1, 2)),
        *((place, Format.int8, forward) for place in (3, 4, 5) for forward in Forward),
        (6, Format.fp8, Forward.bf16),
    ],
)
def test_every_turn_is_within_the_probes_budget(
    place: int, format: Format, forward: Forward, found: list[dict[str, Any]]
) -> None:
    one = found[place][forward]
    assert one["said"] == "", format
    for turn in one["turns"]:
        assert turn["tokens"] >= 8 * SESSIONS
        assert 0 <= turn["mean"] <= one["budget"], "the first as the last"


def test_prefixes_are_kept_and_forks_make_rows(found: list[dict[str, Any]]) -> None:
    cached = found[0]["prefilled"]
    computed = found[1]["prefilled"]
    assert cached < 0.6 * computed
    assert found[0]["rows"] == SESSIONS - 1 + TURNS, "one of the sessions forks at every turn"


def test_sampled_tokens_have_top_tokens_and_others_none(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["top"]
        assert one["most"] == 4
