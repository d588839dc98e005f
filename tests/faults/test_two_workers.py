"""An engine of two workers of which one dies in the middle of an update."""

import os
from pathlib import Path

import pytest
from test_tensor_parallel_engine import answers, has_ended
from tiny_engine import Live, make_live, startable, until

from megatron_rl.config.schema import Format


@pytest.mark.engine
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two cores")
@pytest.mark.fault("one of an engine's two workers is killed in mid-update", "both start again, with the new weights")
def test_both_start_again(tmp_path: Path) -> None:
    live = make_live(tmp_path, Format.int8, tied=True, tensor_parallel=2, request_timeout_s=60)
    try:
        live.restart()
        live.update(1)
        first = answers(live)
        live.update(2)
        session = pid_of(live)
        with startable():
            live.update(1, "second_worker_killed")
        assert answers(live) == first
        assert pid_of(live) != session
        until(lambda: has_ended(session))
    finally:
        live.sampler.close()


def pid_of(live: Live) -> int:
    process = live.sampler.replicas[0].process
    assert process is not None
    return process.pid
