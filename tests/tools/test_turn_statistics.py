"""Corrections over conversations of several turns, where every conversation can be listed."""

from itertools import pairwise

import pytest
import turn_statistics as lab


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_more_of_the_past_a_weight_knows_the_less_it_is_biased(noise: float) -> None:
    """Over all conversations, exactly."""
    sessions = lab.make_sessions(noise)
    assert float(sessions.chances(True).sum()) == pytest.approx(1.0, abs=1e-12), "each session once"
    assert sorted(set(sessions.mask_BT.sum(dim=1).tolist())) == [2, 4, 6]
    bias = {name: lab.of_weight(sessions, weight).bias for name, weight in lab.KINDS.items()}
    for more, less in pairwise(("none", "token", "turn", "prefix", "sequence")):
        assert bias[less] < 0.95 * bias[more]
    assert bias["sequence"] < 1e-5
