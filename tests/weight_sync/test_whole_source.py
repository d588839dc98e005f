"""All writers' tensors on rank 0, or on every rank: what single-sender transports take."""

from __future__ import annotations

from pathlib import Path

import pytest
from spawned import run_ranks
from whole_rank import CASES, run_rank


@pytest.mark.ranks
def test_two_writers_in_one_order(tmp_path: Path) -> None:
    codes, (first, second) = run_ranks(run_rank, tmp_path)
    assert codes == [0, 0]
    for case in CASES:
        for everywhere in (False, True):
            here, there = first[f"{case} {everywhere}"], second[f"{case} {everywhere}"]
            assert here["metas"] == there["metas"], "every rank knows what comes, in which order"
            count = len(here["metas"])
            assert here["passes"] == [count, count]
            assert there["passes"] == ([count, count] if everywhere else [0, 0])
    assert first["interrupted"] == [True, None]
    assert second["interrupted"] == [False, None]
    count = len(first["stages False"]["metas"])
    assert first["diverged"] == [count, None], "the lockstep holds"
    assert second["diverged"][0] == 0
    assert "layers.3.mlp.down_proj.weight: the weight holds NaN" in second["diverged"][1]
