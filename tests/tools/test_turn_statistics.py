"""Corrections over sessions of several turns, where every session can be listed."""

from itertools import pairwise

import pytest
import turn_statistics as lab


@pytest.mark.parametrize("noise", [0.1, 0.3])
def test_the_more_of_the_past_a_weight_knows_the_less_it_is_biased(noise: float) -> None:
    """Over all sessions, exactly."""
    sessions = lab.make_sessions(noise)
    assert float(sessions.chances(True).sum()) == pytest.approx(1.0, abs=1e-12), "each session once"
    assert sorted(set(sessions.mask_BT.sum(dim=1).tolist())) == [2, 4, 6]
    bias = {name: lab.of_weight(sessions, weight).bias for name, weight in lab.KINDS.items()}
    for more, less in pairwise(("none", "token", "turn", "prefix", "sequence")):
        assert bias[less] < 0.95 * bias[more]
    assert bias["sequence"] < 1e-5


def test_a_baseline_by_turn_is_biased_by_what_divides_it_alone() -> None:
    sessions = lab.make_sessions(0.0)
    others, itself, scaled = (
        lab.by_turn(sessions, 8, alone=alone, scaled=scaled)
        for alone, scaled in ((True, False), (False, False), (True, True))
    )
    assert others.bias < 1e-3
    assert others.cosine > 1 - 1e-6
    assert itself.bias > 1 / 8
    assert min(itself.cosine, scaled.cosine) < 0.99999 < others.cosine


def test_over_many_turns_only_weights_of_rows_vanish() -> None:
    weights = lab.long_sessions(lab.DEVIATION)
    assert weights["token"] == pytest.approx(0.9999, abs=1e-4)
    assert weights["sequence"] == pytest.approx(0.06, abs=0.01), "reported: 0.0596"
    assert weights["prefix"] < 0.5
    assert weights["turn"] > 0.9
    assert weights["sequence, geometric"] > 0.99
