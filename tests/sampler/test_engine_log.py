"""What is shown of an engine's log when it fails: its cause, not what vLLM says at every start."""

from pathlib import Path

import pytest

from megatron_rl.sampler.engine_process import log_tail, lost_worker

ROUTINE = """(MainProcess pid=821) WARNING 11-22 03:15:29 [base.py:380] Traceback (most recent call last):
(MainProcess pid=821) WARNING 11-22 03:15:29 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
INFO 11-22 03:15:42 [block_pool.py:861] Successfully reset prefix cache
[W1122 03:15:26.822416415 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1
"""  # noqa: E501
DIED = "(MainProcess pid=8) ERROR 11-22 03:21:52 [x.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"


@pytest.mark.fault("an engine fails after vLLM's usual warnings", "they are not shown as the end of its log")
def test_routine_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    log.write_text(f"{ROUTINE}RuntimeError: no room for the cache\n{ROUTINE}")
    assert log_tail(log) == "RuntimeError: no room for the cache"
    log.write_text(ROUTINE)
    assert log_tail(log) == ""
    assert log_tail(tmp_path / "none") == ""


@pytest.mark.fault("a worker of a larger engine is killed", "the error names the worker and the signal")
def test_a_lost_worker_is_named(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    log.write_text(f"{ROUTINE}{DIED}\nRuntimeError: cancelled\n")
    assert lost_worker(log) == "the engine's worker VllmWorker-1 was ended by SIGKILL (out of memory?)"
    log.write_text(ROUTINE)
    assert lost_worker(log) == ""


def test_a_worker_that_is_gone_before_the_system_says_how_is_named(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    log.write_text("ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: None), shutting down executor.\n")
    assert lost_worker(log) == "the engine's worker VllmWorker-1 was gone"
