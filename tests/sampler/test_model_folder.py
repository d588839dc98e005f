"""The engine's folder and arguments."""

import json
from dataclasses import replace

import pytest
from tiny_engine import make_config, make_model

from megatron_rl.config.schema import EvalSection, Format
from megatron_rl.quantization.engine_layout import quantization_config
from megatron_rl.sampler.embedded import visible_devices
from megatron_rl.sampler.model_folder import engine_arguments, write_engine_folder
from megatron_rl.sampler.protocol import SamplerError


def test_the_layout_of_each_format():
    assert quantization_config(Format.none, []) is None
    int8 = quantization_config(Format.int8, ["model.layers.0.mlp.down_proj"])
    assert int8["format"] == "int-quantized"
    assert {"lm_head", "model.layers.0.mlp.down_proj"} <= set(int8["ignore"])
    group = int8["config_groups"]["group_0"]
    assert (group["weights"]["type"], group["weights"]["strategy"]) == ("int", "channel")
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("token", True)
    block = quantization_config(Format.fp8_block, [])["config_groups"]["group_0"]
    assert block["weights"]["block_structure"] == [128, 128]
    assert block["input_activations"]["group_size"] == 128


def test_the_folder_holds_the_quantized_config_alone(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    (model.folder / "tokenizer.json").write_text("{}")
    folder = write_engine_folder(model.folder, tmp_path / "engine", make_config(Format.fp8))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    written = json.loads((folder / "config.json").read_text())
    assert written.pop("quantization_config")["format"] == "float-quantized"
    assert written == json.loads((model.folder / "config.json").read_text())


def test_a_model_that_is_already_quantized_is_refused(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    folder = write_engine_folder(model.folder, tmp_path / "engine", make_config(Format.int8))
    with pytest.raises(ValueError, match=r"already quantized.*quantization\.format"):
        write_engine_folder(folder, tmp_path / "again", make_config(Format.int8))


def test_arguments_follow_the_config(tmp_path):
    config = replace(make_config(), eval=EvalSection(max_response_tokens=100))
    arguments = engine_arguments(config, tmp_path)
    assert json.loads(json.dumps(arguments)) == arguments, "they travel as a message"
    assert arguments["max_model_len"] == 24 + 100
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["load_format"] == "dummy"
    assert arguments["enforce_eager"] is True
    passed = replace(config, sampler=replace(config.sampler, vllm={"block_size": 32, "enforce_eager": False}))
    assert engine_arguments(passed, tmp_path)["block_size"] == 32
    assert engine_arguments(passed, tmp_path)["enforce_eager"] is False


def test_the_engine_sees_its_own_gpus(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(None) == {}
    assert visible_devices("4,5") == {"CUDA_VISIBLE_DEVICES": "4,5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,6,7")  # what a scheduler gave to the job
    assert visible_devices("2,3") == {"CUDA_VISIBLE_DEVICES": "6,7"}
    with pytest.raises(SamplerError, match=r"sampler\.devices: '4,5', but this job sees 4 GPUs"):
        visible_devices("4,5")
