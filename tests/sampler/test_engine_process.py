"""What an engine's process is given: environment, cores, GPUs."""

import os
import sys

import pytest

from megatron_rl.sampler.engine_process import engine_environment, share_of_cores, thread_binding, visible_devices
from megatron_rl.sampler.protocol import SamplerError


def test_the_learner_s_rendezvous_and_credentials_stay_behind(monkeypatch):
    for name in ("RANK", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PATH", "/bin")
    environment = engine_environment()
    assert environment["PATH"] == "/bin"
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not {"RANK", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "WANDB_API_KEY"} & set(environment)


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
    with pytest.raises(SamplerError, match=r"sampler\.devices: '4,5', but this job sees 4 GPUs"):
        visible_devices("4,5")


def test_each_worker_gets_its_own_cores(monkeypatch):
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
    assert thread_binding(1) == {}
    assert thread_binding(2) == {"VLLM_CPU_OMP_THREADS_BIND": "4,5|6,7"}
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    assert thread_binding(2) == {}


def test_a_server_s_workers_stay_on_its_share_of_the_cores(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # of the whole machine: not this server's
    assert thread_binding(1, "4,5") == {}
    assert thread_binding(2, "4,5,6") == {"VLLM_CPU_OMP_THREADS_BIND": "4|5"}
    assert thread_binding(3, "4,5") == {"VLLM_CPU_OMP_THREADS_BIND": "4|5|4"}


def test_cores_are_divided(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4}, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert [share_of_cores(i, 2) for i in range(2)] == ["0,1", "2,3"]
    assert share_of_cores(0, 1) == share_of_cores(3, 6) == "all"
