"""Environment, cores, GPUs and end of an engine's process, and its shared memory."""

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
    thread_binding,
    visible_devices,
)
from megatron_rl.sampler.client.interface import SamplerError


def test_the_learner_s_rendezvous_and_credentials_stay_behind(monkeypatch):
    kept_back = {"RANK", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY"}
    for name in kept_back:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", "/bin")
    environment = engine_environment()
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert kept_back.isdisjoint(environment)


def test_the_engine_sees_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(None) == {}
    assert visible_devices("4,5") == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")  # what a scheduler gave to the job
    assert visible_devices("2,3") == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(SamplerError, match=r"sampler\.devices: '3,4'"):
        visible_devices("3,4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,-1,3")  # CUDA sees those before what is none
    with pytest.raises(SamplerError, match="1 GPUs"):
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
    monkeypatch.setattr(
        os,
        "sched_getaffinity",
        lambda _: {0, 1, 2, 3, 4},
        raising=False,
    )
    monkeypatch.setattr(sys, "platform", "linux")
    assert [share_of_cores(i, 2) for i in range(2)] == ["0,1", "2,3"]
    assert share_of_cores(0, 1) == share_of_cores(3, 6) == "all"


@pytest.mark.fault("the parent of an engine closes its socket", "the engine's process ends")
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
        assert "-9" in process.ended()
        assert process.log_end() == ""
    finally:
        process.end()


@pytest.mark.parametrize(
    ("given", "engines", "wanted"),
    [
        (None, 1, None),
        ("4,5", 1, "4,5"),
        ("4,5", 2, None),
    ],
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
