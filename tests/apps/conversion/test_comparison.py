"""`verify` finds errors of conversion: swapped rows or experts, stale copies, lost scales."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import config_of, convert, done, made, tensors_of, verdicts
from safetensors.torch import save_file

EXPERTS = "model.layers.1.mlp.experts"
LAYER = "model.layers.0"
Change = Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor | None]


def flip_a_bit(tensor: torch.Tensor, _: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor.view(torch.int16)[0, 0] ^= 1
    return tensor


# the tensor that is wrong, the one that verify has to name, and what is in its place
MISTAKES: list[tuple[str, str, Change]] = [
    (f"{EXPERTS}.0.up_proj.weight", "", lambda _, tensors: tensors[f"{EXPERTS}.1.up_proj.weight"]),
    (
        f"{EXPERTS}.2.down_proj.weight",
        "",
        lambda tensor, _: tensor[[1, 0, *range(2, len(tensor))]],
    ),
    (
        f"{EXPERTS}.3.gate_proj.weight_scale",
        f"{EXPERTS}.3.gate_proj.weight",
        lambda tensor, _: tensor * 0 + 1,
    ),
    (f"{LAYER}.mlp.gate.weight", "", flip_a_bit),
    ("model.norm.weight", "", lambda *_: None),
    # as if smoothing had changed a norm and nothing that reads it
    (
        f"{LAYER}.input_layernorm.weight",
        f"{LAYER}.self_attn.q_proj.weight",
        lambda tensor, _: 2 * tensor,
    ),
]


def write(folder: Path, tensors: dict[str, torch.Tensor], like: Path) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(like / "config.json", folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    source = made(folder / "hf", config_of("qwen3_moe"))
    done("quantize", source, folder / "int8", "--format", "int8")
    return source, folder / "int8"


@pytest.mark.fault(
    "a conversion elsewhere went wrong in one tensor", "verify names it, and ends with status 1"
)
@pytest.mark.parametrize(
    ("wrong", "named", "change"), MISTAKES, ids=[wrong for wrong, _, _ in MISTAKES]
)
def test_one_mistake(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    pair: tuple[Path, Path],
    wrong: str,
    named: str,
    change: Change,
) -> None:
    source, quantized = pair
    tensors = tensors_of(quantized)
    changed = change(tensors.pop(wrong), tensors)
    folder = write(
        tmp_path / "wrong",
        tensors if changed is None else tensors | {wrong: changed.clone()},
        quantized,
    )
    assert (
        convert.main(
            ["verify", str(source), str(folder), "--report", str(tmp_path / "parity.json")]
        )
        == 1
    )
    assert "NOT VERIFIED" in capsys.readouterr().out
    report = json.loads((tmp_path / "parity.json").read_text())
    assert report["verdict"] == "not verified"
    bad = {one["name"] for one in report["worst"] if one["verdict"] in ("differs", "missing")}
    assert (named or wrong) in bad
    assert len(bad) <= (3 if "layernorm" in wrong else 1)


def test_what_is_the_same(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    source, quantized = pair
    assert set(verdicts(tmp_path, source, quantized)) == {"equal", "within_a_step"}
    assert 0.001 < json.loads((tmp_path / "parity.json").read_text())["worst"][0]["error"] < 0.02
    assert set(verdicts(tmp_path, quantized, quantized)) == {"equal"}
    wide = write(
        tmp_path / "fp32",
        {name: tensor.float() for name, tensor in tensors_of(source).items()},
        source,
    )
    assert set(verdicts(tmp_path, wide, source)) == {"rounded"}
    norm = {"model.norm.weight": 2 * tensors_of(source)["model.norm.weight"]}
    double = write(tmp_path / "double", tensors_of(source) | norm, source)
    assert verdicts(tmp_path, source, double, "--bound", 2)["within_the_bound"] == 1
    done("import", source, tmp_path / "checkpoint")
    assert set(verdicts(tmp_path, tmp_path / "checkpoint", source)) == {"equal"}
