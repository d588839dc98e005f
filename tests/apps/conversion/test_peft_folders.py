"""PEFT's folders: merged as PEFT itself merges them, or refused by name."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config_of
from safetensors.torch import load_file, save_file
from simulated import random_hf

from megatron_rl.apps.evaluation.adapters import merged, read
from megatron_rl.config import ConfigError
from megatron_rl.models.hf_folder import HfFolder, write_folder
from megatron_rl.models.shape import ModelShape

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MODEL = config_of("qwen3", tie_word_embeddings=True)
SHAPE = ModelShape.from_hf(MODEL)

# one config a line: what the constructor of PEFT's LoraConfig is given
ACCEPTED = r"""
{"target_modules": ["q_proj", "v_proj"]}
{"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 7.5}
{"target_modules": ["1.self_attn.o_proj", "model.layers.0.mlp.gate_proj"], "use_rslora": true}
"""

# one pair a line, put into a config that is good
REFUSED = r"""
"r": 0
"r": 8
"r": 1000000000000000000000000000000
"r": 4.0
"r": null
"lora_alpha": -8
"lora_alpha": null
"lora_alpha": 1e400
"lora_alpha": NaN
"target_modules": null
"target_modules": []
"target_modules": "k_proj"
"target_modules": ["k_proj"]
"target_modules": ["k_proj", "v_proj", "lm_head"]
"target_modules": ["k_proj", "v_proj", "qproj"]
"rank_pattern": {"k_proj": 8}
"alpha_pattern": {"k_proj": "8"}
"init_lora_weights": "pissa"
"init_lora_weights": null
"arrow_config": {"a": 1}
"loftq_config": {"a": 1}
"use_bdlora": {"a": 1}
"peft_type": "IA3"
"use_dora": "true"
"use_rslora": "no"
"use_qalora": true
"bias": "all"
"lora_bias": true
"modules_to_save": ["lm_head"]
"layer_replication": [[0, 2]]
"trainable_token_indices": [1]
"task_type": "SEQ_CLS"
"exclude_modules": ["k_proj"]
"a_new_variant": false
"""

# one tensor a line, put into a good file: name, shape, dtype, value; -1 takes it away
TENSORS = """
K.lora_A.weight [1] float32 -1
K.lora_B.weight [1] float32 -1
K.lora_B.weight [64,3] float32 1
K.lora_A.weight [3,64] float32 1
K.lora_A.weight [64,4] float32 1
K.lora_A.weight [4,1] float32 1
K.lora_A.weight [4,64] int32 1
K.lora_A.weight [4,64] float8_e4m3fn 1
K.bias [64] float32 0
K.lora_B.bias [64] float32 0
K.lora_magnitude_vector [64] float32 0
K.base_layer.lora_A.weight [4,64] float32 1
K.lora_A.default.weight [4,64] float32 1
model.layers.0.self_attn.k_proj.lora_A.weight [4,64] float32 1
base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [4,64] float32 1
base_model.model.model.layers.99.self_attn.k_proj.lora_A.weight [4,64] float32 1
base_model.model.model.embed_tokens.lora_embedding_A [4,64] float32 1
base_model.model.lm_head.weight [101,64] float32 1
"""

# bytes of a good file, and others in their place; 0.01 is the first number that it holds
DAMAGE = r"""
["F32", "Q99"]
["F32", "I64"]
["[4,64]", "[9,99]"]
["[4,64]", "[-4,9]"]
["[0,1024]", "[0,9999]"]
["[0,1024]", "[-9,999]"]
["}", "]"]
["\u0000\u0000\u0000", "\u00ff\u00ff\u00ff"]
["\n\u00d7#<", ""]
["\n\u00d7#<", "12345"]
"""
MARK = Path("executed_by_a_pickle")
PICKLE = f"cos\nmkdir\n(V{MARK}\ntR.".encode()
FIRST = "base_model.model.model.layers.0.self_attn.k_proj"


def rows(table: str) -> list[str]:
    return table.strip().splitlines()


@pytest.mark.parametrize("config", rows(ACCEPTED))
def test_a_folder_is_merged_as_peft_merges_it(tmp_path: Path, config: str) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = random_hf(SHAPE, torch.float32)
    write_folder(tmp_path / "hf", base, MODEL)
    plain: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    adapted = get_peft_model(copy.deepcopy(plain), LoraConfig(**json.loads(config)))
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(tmp_path)
    its = dict(PeftModel.from_pretrained(plain, tmp_path).merge_and_unload().named_parameters())
    held: Any = read(tmp_path, SHAPE, None)
    get = merged(HfFolder(tmp_path / "hf"), held)
    for name, before in base.items():
        torch.testing.assert_close(
            get(name),
            its[name].detach(),
            rtol=1e-5,
            atol=1e-6,
            msg=name,
        )
        assert torch.equal(get(name), before) == (name not in held.alphas), name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Adapters of rank 4 that can be read, in a folder of their own."""
    parts = product(
        ("0", "1"),
        "kv",
        (("A", (4, 64)), ("B", (64, 4))),
    )
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{one}_proj.lora_{letter}.weight": torch.full(
            size, 0.01
        )
        for layer, one, (letter, size) in parts
    }
    path = tmp_path / "adapters"
    path.mkdir()
    save_file(tensors, path / WEIGHTS)
    about = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["k_proj", "v_proj"]}
    (path / CONFIG).write_text(json.dumps(about))
    return path


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        read(folder, SHAPE, None)
    return str(error.value).removeprefix(f"{folder}: ")


@pytest.mark.parametrize("pair", rows(REFUSED))
def test_a_config_that_is_not_understood(folder: Path, pair: str) -> None:
    good = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(f"{good[:-1]}, {pair}}}")
    key = pair.partition(":")[0].strip('"')
    assert key in (said := refused(folder)) or "lora_A.weight" in said, "the tensor that denies it"


@pytest.mark.parametrize("row", rows(TENSORS))
def test_tensors_that_the_config_denies(folder: Path, row: str) -> None:
    name, shape, dtype, value = row.replace("K.", f"{FIRST}.").split()
    given = load_file(folder / WEIGHTS)
    given[name] = torch.full(json.loads(shape), float(value)).to(getattr(torch, dtype))
    if value == "-1":
        del given[name]
    save_file(given, folder / WEIGHTS)
    assert name.removeprefix("base_model.model.").partition(".lora_")[0] in refused(folder)


@pytest.mark.parametrize("change", rows(DAMAGE))
def test_a_file_that_is_damaged(folder: Path, change: str) -> None:
    old, new = (text.encode("latin1") for text in json.loads(change))
    good = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(good.replace(old, new, 1))
    assert "adapter_model" in (said := refused(folder)) or FIRST in said


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.write_bytes(PICKLE),
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to("../outside"),
    ],
)
def test_what_is_no_file_of_the_folder(folder: Path, make: Callable[[Path], object]) -> None:
    (folder / WEIGHTS).rename(folder.parent / "outside")
    (folder / "adapter_model.bin").write_bytes(PICKLE)
    make(folder / WEIGHTS)
    assert WEIGHTS in refused(folder)
    assert not MARK.exists()
