"""What an engine's process is given, what is shown of its log when it fails, and which shared
memory is its own.
"""

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from megatron_rl import serve
from megatron_rl.config.schema import SamplerSection
from megatron_rl.processes.process import share_of_cores
from megatron_rl.processes.scratch import SHARED_MEMORY, remove_segments, segments_of_session
from megatron_rl.sampler.client.engine_process import (
    EngineProcess,
    ProcessSettings,
    engine_environment,
    log_tail,
    lost_worker,
    thread_binding,
    visible_devices,
)
from megatron_rl.sampler.client.interface import SamplerError


def test_the_learner_s_rendezvous_and_credentials_stay_behind(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", "/bin")
    environment = engine_environment()
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not {
        "RANK",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "TORCHELASTIC_RUN_ID",
        "WANDB_API_KEY",
    } & set(environment)


def test_kernels_that_would_be_compiled_on_first_use_are_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("VLLM_USE_DEEP_GEMM", raising=False)
    assert engine_environment()["VLLM_USE_DEEP_GEMM"] == "0"
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    assert engine_environment()["VLLM_USE_DEEP_GEMM"] == "1"


def test_the_engine_sees_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(None) == {}
    assert visible_devices("4,5") == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")  # what a scheduler gave to the job
    assert visible_devices("2,3") == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(SamplerError, match=r"sampler\.devices: '3,4', but this job sees 4 GPUs"):
        visible_devices("3,4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")  # CUDA sees those before what is none
    with pytest.raises(SamplerError, match="this job sees 1 GPUs"):
        visible_devices("1")


def test_each_worker_gets_its_own_cores(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
    assert thread_binding(1) == {}
    assert thread_binding(2) == {"VLLM_CPU_OMP_THREADS_BIND": "4,5|6,7"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert thread_binding(2) == {}


def test_a_server_s_workers_stay_on_its_share_of_the_cores(monkeypatch):
    # of the whole machine: not this server's
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert thread_binding(1, "4,5") == {}
    assert thread_binding(2, "4,5,6") == {"VLLM_CPU_OMP_THREADS_BIND": "4|5"}
    assert thread_binding(3, "4,5") == {"VLLM_CPU_OMP_THREADS_BIND": "4|5|4"}
    assert [
        engine_environment(workers, cores="4,5,6")["OMP_NUM_THREADS"] for workers in (1, 2, 4)
    ] == ["3", "1", "1"]


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert [share_of_cores(i, 2) for i in range(2)] == ["0,1", "2,3"]
    assert share_of_cores(0, 1) == share_of_cores(3, 6) == "all"


ROUTINE = """(MainProcess pid=821) WARNING 11-22 03:15:29 [base.py:380] Traceback (most recent call last):
(MainProcess pid=821) WARNING 11-22 03:15:29 [base.py:380] ValueError: Tokenizer not available when `skip_tokenizer_init=True`
INFO 11-22 03:15:42 [block_pool.py:861] Successfully reset prefix cache
[W1122 03:15:26.822416415 utils.cpp:68] Warning: NUMA binding: Using MEMBIND policy
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1
"""  # noqa: E501
DIED = "(MainProcess pid=8) ERROR 11-22 03:21:52 [x.py:315] Worker proc VllmWorker-1 died unexpectedly (exit code: -9)"


@pytest.mark.fault(
    "an engine fails after vLLM's usual warnings", "they are not shown as the end of its log"
)
def test_routine_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    log.write_text(f"{ROUTINE}RuntimeError: no room for the cache\n{ROUTINE}")
    assert log_tail(log) == "RuntimeError: no room for the cache"
    log.write_text(ROUTINE)
    assert log_tail(log) == ""
    assert log_tail(tmp_path / "none") == ""


@pytest.mark.fault(
    "a worker of a larger engine is killed", "the error names the worker and the signal"
)
def test_a_lost_worker_is_named(tmp_path: Path) -> None:
    log = tmp_path / "sampler.log"
    for text, said in (
        (f"{ROUTINE}{DIED}\nRuntimeError: cancelled\n", "was ended by SIGKILL (out of memory?)"),
        (DIED.replace("-9", "None"), "was gone"),  # seen before the system had said how it ended
        (ROUTINE, ""),
    ):
        log.write_text(text)
        assert lost_worker(log) == (said and f"the engine's worker VllmWorker-1 {said}")


@pytest.mark.fault("whoever started an engine lets go of its socket", "the engine's process ends")
@pytest.mark.parametrize("listens", [False, True])
def test_the_end_of_its_socket_is_an_engine_s_end(tmp_path: Path, listens: bool) -> None:
    process = EngineProcess(
        ProcessSettings({}, tmp_path / "sampler.log", listens=listens), "secret" * 6
    )
    try:
        process.line.settimeout(0.5)
        with pytest.raises(TimeoutError):
            process.line.recv(1)
        assert process.ended() is None
        process.line.shutdown(socket.SHUT_RDWR)
        assert process.wait(240) == -signal.SIGKILL
        assert (
            process.ended()
            == "its process ended (exit status -9): ended by SIGKILL (out of memory?)"
        )
        assert process.log_end() == ""
    finally:
        process.end()


def test_a_key_is_in_no_command_line(tmp_path: Path) -> None:
    key = "secret" * 6
    process = EngineProcess(
        ProcessSettings({}, tmp_path / "sampler.log", listens=True, host="0.0.0.0", port=7), key
    )
    try:
        assert not any(key in word for word in process._process.args), (
            "/proc may show none of them yet"
        )
        assert process.address == "http://127.0.0.1:7", "everywhere is here too"
    finally:
        process.end()


def test_a_child_that_takes_another_s_place_has_a_log_of_its_own(tmp_path: Path) -> None:
    settings = ProcessSettings({}, tmp_path / "logs" / "sampler.log")
    for restarts in (0, 2):
        EngineProcess(settings, restarts=restarts).end()
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"sampler.log", "sampler_2.log"}


@pytest.mark.parametrize(
    ("given", "engines", "wanted"), [(None, 1, None), ("4,5", 1, "4,5"), ("4,5", 2, None)]
)
def test_a_server_by_itself_takes_no_gpus_of_the_run_s_own(given, engines, wanted):
    assert serve.own_devices(SamplerSection(devices=given, engines=engines)) == wanted


OWNER = """
import mmap, os, sys
names = sys.argv[1:]
maps = [mmap.mmap(os.open("/dev/shm/" + name, os.O_RDWR), 64) for name in names]
print("mapped", flush=True)
sys.stdin.read()
"""


def test_only_what_the_session_has_mapped_is_its_own():
    foreign = SharedMemory(create=True, size=64)
    names = ["psm_of_a_test", "vllm_dist_0a-tp:0-[0-1]-cpushm_1", "another_name_of_a_test"]
    for name in names:
        (SHARED_MEMORY / name).write_bytes(bytes(64))
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert owner.stdout.readline() == "mapped\n"
        found = segments_of_session(owner.pid)
        assert found == set(names[:2])
        owner.kill()
        owner.wait(120)
        assert segments_of_session(owner.pid) == set()
        remove_segments(found)
        remove_segments(found)
        assert not any((SHARED_MEMORY / name).exists() for name in names[:2])
        assert (SHARED_MEMORY / foreign.name.lstrip("/")).exists()
    finally:
        owner.kill()
        remove_segments(names)
        foreign.close()
        foreign.unlink()
