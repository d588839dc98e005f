"""`verify` finds what conversions get wrong elsewhere: swapped rows and experts, stale copies, lost scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import config_of, convert, done, made, tensors_of, verdicts
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.experts"


def swap_experts(tensors: Tensors) -> str:
    one, other = f"{LAYER}.0.up_proj.weight", f"{LAYER}.1.up_proj.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]
    return one


def swap_two_rows(tensors: Tensors) -> str:
    name = f"{LAYER}.2.down_proj.weight"
    tensors[name] = tensors[name][[1, 0, *range(2, len(tensors[name]))]]
    return name


def lose_a_scale(tensors: Tensors) -> str:
    name = f"{LAYER}.3.gate_proj.weight"
    tensors[f"{name}_scale"] = torch.ones_like(tensors[f"{name}_scale"])
    return name


def change_a_bit(tensors: Tensors) -> str:
    name = "model.layers.0.mlp.gate.weight"
    tensors[name].view(torch.int16)[0, 0] ^= 1
    return name


def lose_a_tensor(tensors: Tensors) -> str:
    del tensors["model.norm.weight"]
    return "model.norm.weight"


def flatten_a_norm(tensors: Tensors) -> str:
    """As if smoothing had changed a norm and nothing that reads it."""
    name = "model.layers.0.input_layernorm.weight"
    tensors[name] = tensors[name] * 2
    return "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    source = made(folder / "hf", config_of("qwen3_moe"))
    done("quantize", source, folder / "int8", "--format", "int8")
    return source, folder / "int8"


@pytest.mark.fault("a conversion elsewhere went wrong in one tensor", "verify names it, and ends with status 1")
@pytest.mark.parametrize(
    "mistake", [swap_experts, swap_two_rows, lose_a_scale, change_a_bit, lose_a_tensor, flatten_a_norm]
)
def test_one_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], mistake: Callable[[Tensors], str]
) -> None:
    source, quantized = pair
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    tensors = tensors_of(quantized)
    name = mistake(tensors)
    save_file(tensors, wrong / "model.safetensors", {"format": "pt"})
    (wrong / "config.json").write_text((quantized / "config.json").read_text())
    assert convert.main(["verify", str(source), str(wrong), "--report", str(tmp_path / "parity.json")]) == 1
    assert "NOT VERIFIED" in capsys.readouterr().out
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["verdict"] == "not verified"
    bad = {one["name"] for one in report["worst"] if one["verdict"] in ("differs", "missing")}
    assert name in bad
    assert len(bad) <= (3 if mistake is flatten_a_norm else 2)


def test_what_is_the_same(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    source, quantized = pair
    assert set(verdicts(tmp_path, source, quantized)) == {"equal", "within_a_step"}
    assert 0.001 < json.loads((tmp_path / "parity.json").read_text())["worst"][0]["error"] < 0.02
    assert set(verdicts(tmp_path, quantized, quantized)) == {"equal"}
    wide = tmp_path / "fp32"
    wide.mkdir()
    save_file({name: t.float() for name, t in tensors_of(source).items()}, wide / "model.safetensors", {"format": "pt"})
    shutil.copy(source / "config.json", wide)
    assert set(verdicts(tmp_path, wide, source)) == {"rounded"}
    done("import", source, tmp_path / "checkpoint")
    assert set(verdicts(tmp_path, tmp_path / "checkpoint", source)) == {"equal"}
