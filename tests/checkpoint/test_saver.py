"""Saved checkpoints: megatron-core reads them, and a full disk destroys no earlier one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import learner_cases as cases
import pytest
from helpers import file_system

from megatron_rl.checkpoint.saver import FAILED_SAVES

pytestmark = pytest.mark.ranks
LAYOUTS: dict[str, dict[str, Any]] = {"one": {}, "tp2": {"tensor_parallel": 2}}
SMALL_MB = 16


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system for a few checkpoints of the tiny model."""
    with file_system(tmp_path_factory.mktemp("small") / "disk", f"{SMALL_MB}m") as path:
        yield path


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        job = {
            "name": name,
            "kind": "saves",
            "hf": cases.QWEN3,
            "precision": "bf16",
            "layout": layout,
        }
        job |= {"root": str(small / name), "fills": small.is_mount()}
        found |= cases.run_ranks(
            2 if layout else 1, [job], tmp_path_factory.mktemp(f"saver_{name}")
        )
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_megatron_core_reads_a_checkpoint(results: dict[str, Any], name: str) -> None:
    read = results[name]["megatron"]
    assert read["wrong"] == []
    assert read["compared"] > 40  # weights, and three tensors of the optimizer for each
    assert read["unsynced"] == [], (
        "the older ones are removed after it: a machine may lose its power then"
    )
    assert len(read["modes"]) == 1  # all its files have the same permissions


@pytest.mark.fault(
    "the disk is full in the middle of a save", "the run goes on, older ones stand, nothing is left"
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_full_disk(results: dict[str, Any], name: str) -> None:
    found = results[name]["disk"]
    if not found:
        pytest.skip("needs the right to mount")
    (said,) = found["said"]
    assert "checkpoint of step 4" in said
    assert "No space left" in said or "os error 28" in said or "enforce fail" in said, said
    assert said.endswith(" of step 2")
    full = {"entries": ["filler", "step_2"], "whole": 2, "metrics": {FAILED_SAVES: 1.0}}
    assert found["while full"] == full
    after = {"entries": ["step_2", "step_6"], "whole": 6, "metrics": {FAILED_SAVES: 0.0}}
    assert found["afterwards"] == after
