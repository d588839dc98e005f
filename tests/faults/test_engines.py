"""Crash of one of an engine's two workers during an update."""

import os
from pathlib import Path

import pytest
from helpers import wait_for
from test_tensor_parallel_engine import has_ended
from tiny_engine import make_live, startable

from megatron_rl.config.schema import Format


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
