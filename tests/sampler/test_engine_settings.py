"""Arguments of vLLM by the configuration, and the engine's folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_engine import make_config, make_model

from megatron_rl.config.sampling import TIES, TopLogprobsSection
from megatron_rl.config.schema import (
    Config,
    Device,
    EvalSection,
    Format,
    ModelSection,
    Precision,
    QuantizationSection,
)
from megatron_rl.sampler.engine_settings import (
    WORKER_EXTENSION,
    EngineSettings,
    engine_arguments,
    write_engine_folder,
)
from megatron_rl.sampler.replicas import process_settings


def arguments_of(config: Config, **settings: Any) -> dict[str, Any]:
    return engine_arguments(replace(EngineSettings.from_config(config), **settings), Path("engine"))


def test_arguments_follow_the_config():
    arguments = arguments_of(replace(make_config(), eval=EvalSection(max_response_tokens=100)))
    assert json.loads(json.dumps(arguments)) == arguments, "they travel as a message"
    assert arguments["max_model_len"] == 24 + 100
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["load_format"] == "dummy"
    assert arguments["enforce_eager"] is True
    assert arguments["enable_prefix_caching"] is True
    passed = {"block_size": 32, "enforce_eager": False}
    assert passed.items() <= arguments_of(make_config(vllm=passed)).items()


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({"top_k": 5}, 5 + TIES),
        ({"top_logprobs": TopLogprobsSection(max=32)}, 32),
        ({"top_k": 5, "top_logprobs": TopLogprobsSection(max=32)}, 32),
        ({"top_k": 50, "top_logprobs": TopLogprobsSection(max=32)}, 50 + TIES),
        ({}, None),
    ],
)
def test_an_engine_returns_as_many_logprobs_as_are_requested(keys, most):
    config = make_config()
    config = replace(config, rollout=replace(config.rollout, **keys))
    assert arguments_of(config).get("max_logprobs") == most


@pytest.mark.parametrize("given", [{}, {"rope_theta": 5000.0}])
def test_logits_are_in_fp32_where_the_learner_s_are(given):
    config = make_config(vllm={"hf_overrides": dict(given)} if given else {})
    wide = replace(config, model=ModelSection(head_precision=Precision.fp32))
    assert arguments_of(wide)["hf_overrides"] == given | {"head_dtype": "float32"}
    assert arguments_of(config).get("hf_overrides", {}) == given, "the recipe is left as it is"


def test_on_gpus_nothing_is_compiled_or_downloaded_at_the_start():
    arguments = arguments_of(make_config(), device=Device.cuda)
    compilation = arguments["compilation_config"]
    assert arguments["kernel_config"] == {"enable_flashinfer_autotune": False}
    assert compilation["pass_config"] == {"fuse_allreduce_rms": False}
    assert compilation["max_cudagraph_capture_size"] == arguments["max_num_seqs"]
    wished = {"kernel_config": {"enable_flashinfer_autotune": True}, "max_num_seqs": 100}
    asked = arguments_of(make_config(vllm=wished), device=Device.cuda)
    assert asked["kernel_config"] == wished["kernel_config"], "a recipe has the last word"
    assert asked["compilation_config"]["max_cudagraph_capture_size"] == 112, (
        "vLLM captures every 16th size"
    )


def test_each_engine_of_several_gets_its_format(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    several = make_config(Format.fp8, engines=2, formats=[Format.int8, Format.none])
    started = process_settings(
        EngineSettings.from_config(several), model.folder, tmp_path, tmp_path, WORKER_EXTENSION
    )
    assert [Path(one.arguments["model"]).name for one in started] == ["int8", "none"]
    assert [one.log_path.name for one in started] == ["sampler.log", "sampler-2.log"]


def test_the_folder_holds_the_quantized_config_and_the_tokenizer_of_tool_calls(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    (model.folder / "tokenizer.json").write_text("{}")
    folder = write_engine_folder(model.folder, tmp_path / "engine", QuantizationSection(Format.fp8))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert (folder / "tokenizer.json").samefile(model.folder / "tokenizer.json")
    written = json.loads((folder / "config.json").read_text())
    assert written.pop("quantization_config")["format"] == "float-quantized"
    assert written == json.loads((model.folder / "config.json").read_text())


def test_a_model_that_is_already_quantized_is_refused(tmp_path):
    model = make_model(tmp_path / "hf", tied=True)
    folder = write_engine_folder(
        model.folder, tmp_path / "engine", QuantizationSection(Format.int8)
    )
    with pytest.raises(ValueError, match=r"already quantized.*quantization\.format"):
        write_engine_folder(folder, tmp_path / "again", QuantizationSection(Format.int8))
