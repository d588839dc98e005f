"""Hostile folders: one line names the problem, and a conversion runs and writes nothing."""

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


def in_pickle(folder: Path) -> None:
    weights = (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    weights.write_bytes(pickle.dumps({"model.norm.weight": Attack()}))


def link(folder: Path) -> None:
    elsewhere = (folder / "model.safetensors").rename(folder.parent / "elsewhere")
    (folder / "model.safetensors").symlink_to(elsewhere)


def weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return attack


def config(**changes: Any) -> Callable[[Path], None]:
    def attack(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return attack


quantized = config(quantization_config={"quant_method": "fp8"})
ATTACKS: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickled": (in_pickle, "pickle files"),
    "link": (link, "link out"),
    "header bomb": (
        weights(lambda had: struct.pack("<Q", 1 << 62) + had[8:]),
        "cut off",
    ),
    "lying shape": (
        weights(lambda had: had.replace(b'"shape":[101,64]', b'"shape":[101,65]', 1)),
        "[101, 65], but has",
    ),
    "cut off": (weights(lambda had: had[:-1]), "cut off"),
    "quantized": (quantized, "(fp8)"),
}
CASES = [(command, name) for name in ATTACKS for command in ("import", "quantize")]
CASES += [(command, "link") for command in COMMANDS if command not in ("import", "quantize")]


@pytest.mark.fault(
    "a hostile model folder", "every command says what is wrong in one line, and writes nothing"
)
@pytest.mark.parametrize(("command", "name"), CASES)
def test_an_attack(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    attack, expected = ATTACKS[name]
    monkeypatch.chdir(tmp_path)
    source = made(tmp_path / "hf", config_of("llama"))
    attack(source)
    if command == "dequantize":
        quantized(source)  # else there is nothing to do
    other = made(tmp_path / "good", config_of("llama")) if command == "verify" else tmp_path / "out"
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    target = [] if command == "inspect" else [other]
    said = fails(
        capsys, command, source, *target, *(["--format", "int8"] if command == "quantize" else [])
    )
    assert expected in said
    assert said.count("error: ") == 1
    assert "Traceback" not in said
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.fault("a hostile checkpoint", "verify refuses it as export does")
def test_a_checkpoint_whose_index_is_an_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = made(tmp_path / "hf", config_of("llama"))
    done("import", source, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Attack()))
    for words in (["verify", "hf", "checkpoint"], ["inspect", "checkpoint"]):
        assert "which no checkpoint needs" in fails(
            capsys, words[0], *(tmp_path / word for word in words[1:])
        )
    assert torch.load(tmp_path / "checkpoint" / "common.pt", weights_only=True) == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
