"""Tokens and operations a second, from a step's metrics."""

import json

import pytest

from megatron_rl.config.schema import Device, LearnerSection, SamplerSection
from megatron_rl.data.toy import hf_config
from megatron_rl.learner.achieved import Achieved, memory_peaks
from megatron_rl.models.model import Model
from megatron_rl.preflight.machine import Machine, named
from megatron_rl.preflight.roles import roles

HOST = Machine(Device.cpu, "a host")
LINE = {
    "time/step": 4.0,
    "time/update": 2.0,
    "rollout/tokens": 8000,
    "rollout/n_trained": 100,
    "rollout/trained_tokens": 1500,
    "rollout/response_tokens_mean": 5.0,
}


def achieved(tmp_path, machine: Machine) -> Achieved:
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(hf_config() | sizes))
    model = Model.read(tmp_path, LearnerSection())
    devices = roles(model.layout, SamplerSection(), machine.gpus).gpus
    peak = machine.gpu.tflops if machine.gpu else None
    return Achieved(model, devices, peak, sampled=True)


def test_operations_are_those_of_the_matrices(tmp_path) -> None:
    found = achieved(tmp_path, named("1x8xH100"))(LINE)
    attention = 64 * (2 * 64 + 2 * 32)
    mlp = 3 * 64 * 96
    matrices = 2 * (attention + mlp)
    looking_back = 2 * 2 * 64 * 15  # both products, over half of the mean length, at every layer
    head = 2 * 64 * 17
    of_tokens = 1500 * (2 * matrices + looking_back) + 100 * 5 * head
    tflops = found["perf/update_tflops_per_device"]
    assert tflops * 1e12 == pytest.approx(3 * of_tokens / 2.0)
    assert found["perf/update_mfu"] == pytest.approx(tflops / 989)


def test_devices_are_those_of_learner_and_engine(tmp_path) -> None:
    found = achieved(tmp_path, HOST)
    assert found.devices == 2
    assert found(LINE)["perf/tokens_per_s_per_device"] == 1000
    assert "perf/update_mfu" not in found(LINE)


def test_a_line_without_an_update_has_no_rates(tmp_path) -> None:
    assert achieved(tmp_path, HOST)({"time/step": 1.0}) == {}


def test_memory_is_that_of_this_process() -> None:
    assert 0.05 < memory_peaks()["perf/host_memory_gib"] < 100
