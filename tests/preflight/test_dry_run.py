"""Dry runs: late refusals of learner and engine, and machines that are only named."""

import json
import re
from pathlib import Path

import pytest
from helpers import APART, Command

from megatron_rl.config import ConfigError
from megatron_rl.config.schema import Device
from megatron_rl.preflight.machine import GPUS, Machine, named

ROOT = Path(__file__).parents[2]
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def one_says(found: str, words: list[str]) -> None:
    """Assert that one line of the errors has all of these words."""
    assert any(all(word in line for word in words) for line in found.splitlines()), found


def with_model(place: Path, **changes: object) -> None:
    file = place / "data" / "toy" / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "overrides", "words"),
    [
        (
            {"attention_bias": True},
            [],
            ["model.path", "attention_bias=true", "biases", "another model"],
        ),
        ({"mlp_bias": True}, [], ["model.path", "mlp_bias=true", "biases", "another model"]),
        ({"hidden_act": "gelu"}, [], ["model.path", "hidden_act='gelu'", "'silu'"]),
        (
            {"use_sliding_window": True, "sliding_window": 8},
            [],
            ["model.path", "sliding_window", "another model"],
        ),
        (
            {"model_type": "llama", "sliding_window": 8},
            [],
            ["model.path", "sliding_window", "another model"],
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            [],
            ["model.path", "sliding_window"],
        ),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            [],
            ["model.path", "rope_type 'yarn'", "default, linear, llama3"],
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            [],
            ["model.path", "'llama3'", "low_freq_factor"],
        ),
        ({"partial_rotary_factor": 0.5}, [], ["model.path", "partial_rotary_factor"]),
        ({"rope_theta": None, "rope_parameters": None}, [], ["model.path", "lacks rope_theta"]),
        ({"model_type": "qwen4"}, [], ["model.path", "'qwen4'", "did you mean 'qwen"]),
        ({"num_hidden_layers": None}, [], ["model.path", "lacks num_hidden_layers"]),
        (
            {**MOE, "mlp_only_layers": [0]},
            ["learner.tensor_parallel=1"],
            ["model.path", "dense layers among experts"],
        ),
        (MOE, [], ["learner.megatron.sequence_parallel=false", "mixture of experts", "true"]),
        (
            {**MOE, "num_experts_per_tok": 1},
            ["learner.tensor_parallel=1"],
            ["num_experts_per_tok=1", "router"],
        ),
        (
            {**MOE, "num_experts_per_tok": 5},
            ["learner.tensor_parallel=1"],
            ["num_experts_per_tok=5", "4 experts"],
        ),
        (
            {},
            ["learner.tensor_parallel=8"],
            ["learner.tensor_parallel=8", "attention heads", "nearest valid"],
        ),
        ({}, ["learner.router=replay"], ["learner.router: replay", "no experts", "use own"]),
        ({}, ["learner.megatron.bf16=false"], ["learner.megatron.bf16", "learner.precision"]),
        (
            {},
            ["learner.megatron.context_parallel_size=2"],
            ["learner.megatron.context_parallel_size", "remove this"],
        ),
    ],
)
def test_models_that_the_learner_or_the_engine_would_refuse(
    place: Path, command: Command, changes: dict, overrides: list[str], words: list[str]
) -> None:
    with_model(place, **changes)
    one_says(command.refused("quantization=none", *overrides), words)


def planned(command: Command, recipe: str, machine: str, *overrides: str) -> str:
    return command.dry_run("--on", machine, *overrides, recipe=ROOT / "recipes" / recipe)


@pytest.mark.parametrize("recipe", ["dapo_int8.yaml", "dapo_fp8.yaml"])
def test_a_recipe_for_a_machine_elsewhere(recipe: str, empty: Path, command: Command) -> None:
    said = planned(command, recipe, "1x8xH100-80")
    assert "8 x H100 " in said
    assert "8190.74M parameters" in said  # as published: 8.2B
    fetched = [line.split() for line in said.splitlines() if line.startswith("fetch ")]
    keys = [words[2].rstrip(":") for words in fetched]
    assert keys == ["(model.path)", "(data.train)", "(data.eval)"]
    assert "missing: " not in said
    assert list(empty.iterdir()) == []


@pytest.mark.usefixtures("empty")
@pytest.mark.parametrize(
    ("recipe", "machine", "overrides", "words"),
    [
        (
            "dapo_int8.yaml",
            "1x8xB200",
            [],
            ["quantization.format: int8", "no kernel on B200", "use fp8"],
        ),
        ("dapo_fp8.yaml", "1x8xA100", [], ["quantization.format: fp8", "8.9", "A100"]),
        (
            "dapo_fp8.yaml",
            "1x8xA100",
            ["quantization=int8"],
            ["fp8", "8.9", "A100", "leave it out"],
        ),
        (
            "dapo_fp8.yaml",
            "1x8xH100",
            ["learner.megatron.fp8_recipe=mxfp8"],
            ["learner.megatron.fp8_recipe: mxfp8", "10", "H100", "use blockwise"],
        ),
        (
            "dapo_fp8.yaml",
            "1x8xL40S",
            [],
            ["learner.megatron.fp8_recipe: blockwise", "L40S", "use tensorwise"],
        ),
        ("dapo_int8.yaml", "1x4xH100-80", [], ["sampler.devices: 4,5,6,7", "0 to 3", "4 x H100"]),
        (
            "dapo_int8.yaml",
            "1x8xH100",
            [*APART, "learner.data_parallel=2", "sampler.vllm.gpu_memory_utilization=null"],
            ["share GPU 4,5,6,7", "sampler.vllm.gpu_memory_utilization", "sampler.sleep"],
        ),
        (
            "quickstart.yaml",
            "1x2xL40S",
            ["model.path=Qwen3-8B"],
            ["share GPU 0", "gpu_memory_utilization"],
        ),
        (
            "quickstart.yaml",
            "1x2xH100",
            [],
            ["model.path", "runs/toy_sft/model", "cards: Llama-3.1-70B-Instruct, "],
        ),
        ("dapo_int8.yaml", "1x8xRTX", [], ["--on 1x8xRTX", *GPUS]),
        ("dapo_int8.yaml", "8xH100", [], ["--on 8xH100", "1x8xH100-80"]),
        ("dapo_int8.yaml", "0x8xH100", [], ["--on 0x8xH100"]),
    ],
)
def test_what_a_machine_elsewhere_cannot_run(
    recipe: str, machine: str, overrides: list[str], words: list[str], command: Command
) -> None:
    one_says(command.refused("--on", machine, *overrides, recipe=ROOT / "recipes" / recipe), words)


@pytest.mark.usefixtures("empty")
def test_shares_and_sleep_make_room(command: Command) -> None:
    together = (*APART, "learner.data_parallel=2", "sampler.sleep=offload")
    share = "sampler.vllm.gpu_memory_utilization"
    recipe = ROOT / "recipes" / "dapo_int8.yaml"
    for overrides in (together[:-1], together, (*together, f"{share}=null")):
        (line,) = command.refused("--on", "1x8xH100", *overrides, recipe=recipe).splitlines()
        value, largest = re.search(
            rf"{share}: (\S+), .* the largest that fits is (\S+)", line
        ).groups()
        assert value == ("null" if overrides[-1].endswith("null") else "0.9")
        planned(command, "dapo_int8.yaml", "1x8xH100", *overrides, f"{share}={largest}")
    planned(command, "dapo_int8.yaml", "1x8xH200", *together, f"{share}=0.7")  # more memory
    planned(
        command, "dapo_int8.yaml", "2x8xH100", *APART, "learner.data_parallel=4", f"{share}=0.6"
    )


@pytest.mark.usefixtures("empty")
def test_a_summary_shows_each_edit(command: Command) -> None:
    changes = (
        "loss.kl_coef=0.001",
        "eval.sets={aime: {path: aime.jsonl, samples: 8}}",
        "optim.decay=cosine",
        "checkpoint.best=eval/aime/accuracy",
        "checkpoint.every=10min",
    )
    said = planned(command, "dapo_int8.yaml", "1x8xH100", *changes)
    rows = dict(line.split(maxsplit=1) for line in said.splitlines())
    assert rows["learner"].endswith("(TP4 PP2), bf16")
    assert rows["loss"].startswith("name=ppo clip_low=0.2 clip_high=0.28 ")
    assert "kl_coef=0.001" in rows["loss"]
    assert rows["optim"].startswith("lr=1e-06 warmup_steps=80 decay=cosine")
    assert "aime (aime.jsonl x 8)" in rows["eval"]
    assert rows["data"].endswith("BytedTsinghua-SIA/DAPO-Math-17k[train]: not read")
    assert rows["reward"] == "math_dapo"
    assert rows["checkpoint"].endswith(
        "every=10min keep_last=2 best=eval/aime/accuracy export_hf=True"
    )
    assert rows["from"].startswith("base  loss.kl_coef 0.001")
    assert rows["optim.decay"].startswith("cosine")
    off = planned(command, "dapo_fp8.yaml", "1x8xH100", "eval.every=0")
    rows = dict(line.split(maxsplit=1) for line in off.splitlines())
    assert "fp8 (e4m3, blockwise)" in rows["learner"]
    assert rows["eval"] == "never"


def test_a_machine_elsewhere_is_for_dry_runs(place: Path, command: Command) -> None:
    said = command.refused("--on", "1x8xH100-80", dry=False)
    assert "--on 1x8xH100-80" in said
    assert "--dry-run" in said
    assert not (place / "runs").exists()


def test_named_machines() -> None:
    assert named("2x4xh200-141") == Machine(
        Device.cuda, "H200 (141 GiB)", 9.0, gpus=4, nodes=2, gib=141
    )
    with pytest.raises(ConfigError, match="L40S"):
        named("1x1xV100")
