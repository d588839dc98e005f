"""Four ranks of a learner and an engine of two: what a sync moves, counted, is what the plan says
before.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_bytes_that_move_are_those_of_the_plan(kind: str) -> None:
    bench = [
        sys.executable,
        str(ROOT / "tools/bench/sync_shares.py"),
        "--json",
        "--repeats",
        "1",
        "--hidden",
        "256",
    ]
    done = subprocess.run(
        [*bench, "--kinds", kind],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout.splitlines()[-1])
    assert max(row["written"]) == row["planned_write"]
    assert row["read"] == pytest.approx(row["planned_read"], rel=0.01)
    assert max(max(row["written"]), row["read"]) <= 2 * max(row["bound_out"], row["bound_into"])
    assert row["read"] < 0.6 * sum(row["written"]), "not the whole"
    assert len(row["written"]) == (2 if kind == "dense" else 4), (
        "each stage's, and each expert rank's"
    )
