"""All writers' tensors on rank 0, or on every rank: what single-sender transports take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from simulated import TIMEOUT_S
from spawned import exit_codes
from whole_rank import CASES, run_rank


@pytest.mark.ranks
def test_two_writers_in_one_order(tmp_path: Path) -> None:
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    arguments = [(rank, str(tmp_path / "store"), str(out)) for rank, out in enumerate(outs)]
    assert exit_codes(run_rank, arguments, TIMEOUT_S) == [0, 0]
    first, second = (json.loads(out.read_text()) for out in outs)
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
