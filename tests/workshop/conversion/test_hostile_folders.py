"""What a stranger may have put into a folder that is converted: one line names it, and nothing runs or is written."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import config_of, done, fails, made

COMMANDS = ("import", "export", "quantize", "dequantize", "verify", "inspect")


class Attack:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, ("touch executed",)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"model.norm.weight": Attack()}))


def disguised(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Attack()))


def leads_out(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../other.safetensors"}}')


def link(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def header_bomb(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 1 << 62))


def huge_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 64 << 20))
        file.truncate(65 << 20)


def lying_shape(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"shape":[101,64]', b'"shape":[101,65]', 1))


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def with_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def another_family(folder: Path) -> None:
    with_config(folder, model_type="gpt_oss")


def quantized(folder: Path) -> None:
    with_config(folder, quantization_config={"quant_method": "fp8"})


def a_tensor_less(folder: Path) -> None:
    with_config(folder, num_hidden_layers=3)


ATTACKS = {
    pickled: "weights in pickle files (.bin) are not read",
    disguised: "is not a safetensors file",
    leads_out: "weight_map",
    link: "is a link out of its folder",
    header_bomb: "is not a safetensors file or is cut off",
    huge_header: "a header of",
    lying_shape: "[101, 65], but has",
    cut_off: "is cut off or padded",
    another_family: "'gpt_oss' is not supported",
    quantized: "holds quantized weights (fp8)",
    a_tensor_less: "num_hidden_layers of config.json is 3",
}
# what these do not need to know
LET_PASS = {
    ("export", another_family), ("export", a_tensor_less),
    ("inspect", another_family), ("inspect", quantized), ("inspect", a_tensor_less),
    ("verify", another_family), ("verify", quantized), ("verify", a_tensor_less),
    ("dequantize", another_family), ("dequantize", quantized), ("dequantize", a_tensor_less),
}  # fmt: skip


@pytest.mark.fault("a hostile model folder", "every command says what is wrong in one line, and writes nothing")
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_attack(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    attack: Callable[[Path], None],
) -> None:
    if (command, attack) in LET_PASS:
        return
    monkeypatch.chdir(tmp_path)
    source = made(tmp_path / "hf", config_of("llama"))
    attack(source)
    if command == "dequantize":
        quantized(source)  # else there is nothing to do
    other = made(tmp_path / "good", config_of("llama")) if command == "verify" else tmp_path / "out"
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    target = [] if command == "inspect" else [other]
    said = fails(capsys, command, source, *target, *(["--format", "int8"] if command == "quantize" else []))
    assert ATTACKS[attack] in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.fault("a hostile checkpoint", "verify refuses it as export does")
def test_a_checkpoint_whose_index_is_an_attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = made(tmp_path / "hf", config_of("llama"))
    done("import", source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Attack()))
    for words in (["verify", "hf", "checkpoint"], ["inspect", "checkpoint"]):
        assert "which no checkpoint needs" in fails(capsys, words[0], *(tmp_path / word for word in words[1:]))
    assert torch.load(tmp_path / "checkpoint" / "common.pt", weights_only=True) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
