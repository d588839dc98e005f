"""An engine whose thread hangs behind a door that answers."""

import os
import sys
import time
from pathlib import Path

import pytest
from deaf_receiver import MARKER
from tiny_engine import PROMPTS, SAMPLING, make_model, make_settings

from megatron_rl.config.schema import FleetSection
from megatron_rl.sampler.sampler import Sampler

PATIENCE_S = 300


@pytest.mark.fault(
    "the thread that owns a server's engine waits for ever", "three looks; the other server answers; it starts again"
)
def test_a_deaf_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "deaf"
    monkeypatch.setenv(MARKER, str(marker))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notes: list[str] = []
    model, settings = make_model(tmp_path / "hf", True), make_settings(fleet=FleetSection(replicas=2))
    extension = "deaf_receiver.DeafExtension"
    with Sampler(settings, model.folder, tmp_path, note=notes.append, worker_extension=extension) as fleet:
        marker.touch()
        until_noted(fleet, notes, "is out: did not answer 3 times in a row")
        assert any("neither answers nor works" in note for note in notes)
        until_noted(fleet, notes, "is back with policy version")
        assert fleet.stats.restarts == 1


def until_noted(fleet: Sampler, notes: list[str], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not any(what in note for note in notes):
        assert time.monotonic() < deadline, notes
        assert len(fleet.generate(PROMPTS, SAMPLING, seed=1, first_group=0, step=0)) == 2 * len(PROMPTS)
        time.sleep(0.2)
