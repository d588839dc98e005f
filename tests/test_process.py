"""The collector is slowed down where a process imports an engine, and nowhere else."""

import gc
import subprocess
import sys

import pytest

from megatron_rl.process import rare_collections


@rare_collections()
def failing_import() -> None:
    assert gc.get_threshold()[0] > 100_000
    raise ImportError


def test_the_usual_pace_comes_back_whatever_happens() -> None:
    usual = gc.get_threshold()
    gc.set_threshold(701, 11, 12)
    try:
        with pytest.raises(ImportError):
            failing_import()
        assert gc.get_threshold() == (701, 11, 12)
    finally:
        gc.set_threshold(*usual)


def test_a_program_that_knows_of_servers_keeps_its_pace() -> None:
    program = "import gc, megatron_rl.engine.server; print(gc.get_threshold()[0])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(done.stdout) < 10_000
