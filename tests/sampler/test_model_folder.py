"""The engine's folder."""

import json

import pytest
from tiny_engine import make_model

from megatron_rl.config.schema import Format, QuantizationSection
from megatron_rl.quantization.formats import quantization_config
from megatron_rl.sampler.model_folder import write_engine_folder


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
    folder = write_engine_folder(model.folder, tmp_path / "engine", QuantizationSection(Format.fp8))
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    written = json.loads((folder / "config.json").read_text())
    assert written.pop("quantization_config")["format"] == "float-quantized"
    assert written == json.loads((model.folder / "config.json").read_text())


def test_a_model_that_is_already_quantized_is_refused(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    folder = write_engine_folder(model.folder, tmp_path / "engine", QuantizationSection(Format.int8))
    with pytest.raises(ValueError, match=r"already quantized.*quantization\.format"):
        write_engine_folder(folder, tmp_path / "again", QuantizationSection(Format.int8))
