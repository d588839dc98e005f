"""An engine whose thread hangs; one of two workers of which one dies in
mid-update.
"""

import os
import sys
from pathlib import Path

import pytest
from helpers import wait_for
from test_tensor_parallel_engine import has_ended
from tiny_engine import PROMPTS, SAMPLING, make_live, make_model, make_settings, startable

from megatron_rl.config.schema import Format
from megatron_rl.sampler.sampler import Sampler


@pytest.mark.fault(
    "the thread that owns one of two engines waits for ever",
    "three looks; the other engine answers; it starts again",
)
def test_a_deaf_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "deaf"
    notes = list[str]()
    monkeypatch.setenv("MEGATRON_RL_TESTS_DEAF", str(marker))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    model = make_model(tmp_path / "hf", True)
    settings = make_settings(engines=2)
    extension = "faulty_receiver.FaultyExtension"
    with Sampler(
        settings, model.folder, tmp_path, note=notes.append, worker_extension=extension
    ) as fleet:

        def noted(what: str) -> bool:
            assert len(fleet.generate(PROMPTS, SAMPLING, seed=1, first_group=0, step=0)) == 2 * len(
                PROMPTS
            )
            return any(what in note for note in notes)

        marker.touch()
        wait_for(lambda: noted("is out: did not answer 3 times in a row"))
        assert any("neither answers nor works" in note for note in notes)
        wait_for(lambda: noted("is back with policy version"))
        assert fleet.stats.restarts == 1


@pytest.mark.engine
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
@pytest.mark.fault(
    "one of an engine's two workers is killed in mid-update",
    "both start again, with the new weights",
)
def test_both_workers_start_again(tmp_path: Path) -> None:
    live = make_live(tmp_path, Format.int8, tied=True, tensor_parallel=2, request_timeout_s=60)
    try:
        live.restart()
        live.update(1)
        first = live.answers()
        live.update(2)
        session = live.sampler.replicas[0].process.pid
        with startable():
            live.update(1, "second_worker_killed")
        assert live.answers() == first
        assert live.sampler.replicas[0].process.pid != session
        wait_for(lambda: has_ended(session))
    finally:
        live.sampler.close()
