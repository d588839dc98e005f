"""Hugging Face folders in and out: the bytes of the safetensors library; errors of broken ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.hf_folder import (
    INDEX,
    SINGLE,
    HfFolder,
    SafetensorsWriter,
    make_header,
    write_folder,
)
from megatron_rl.models.tensors import DTYPES, TensorSpec, as_bytes, torch_dtype

TENSORS = {
    "b": torch.randn(3, 4).bfloat16(),
    "a": torch.randn(5),
    "c.x": torch.ones(2, 2, dtype=torch.int8),
    "é": torch.randn(7).bfloat16(),
    "g": torch.arange(3),
    "h": torch.arange(3, dtype=torch.int32),
    "d": torch.randn(2).half(),
    "i": torch.ones(3, dtype=torch.bool),
    "f": torch.randn(4).to(torch.float8_e4m3fn),
    "j": torch.randn(3).double(),
    "k": torch.arange(3, dtype=torch.int16),
    "l": torch.arange(3, dtype=torch.uint8),
}


def test_the_librarys_own_bytes(tmp_path: Path) -> None:
    assert {str(tensor.dtype) for tensor in TENSORS.values()} == {f"torch.{one}" for one in DTYPES}
    write_folder(tmp_path / "hf", TENSORS, {"model_type": "x"})
    save_file(TENSORS, tmp_path / "reference", {"format": "pt"})
    assert (tmp_path / "hf" / SINGLE).read_bytes() == (tmp_path / "reference").read_bytes()


@pytest.mark.parametrize("max_bytes", [8, 1000])
def test_tensors_come_back_from_one_file_or_many(tmp_path: Path, max_bytes: int) -> None:
    write_folder(tmp_path, TENSORS, {}, max_bytes)
    assert (tmp_path / INDEX).exists() is (max_bytes == 8)
    folder = HfFolder(tmp_path)
    assert sorted(folder.names) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert TensorSpec.of(name, folder.get(name)) == TensorSpec.of(name, tensor)
        assert torch.equal(folder.get(name).view(torch.uint8), tensor.view(torch.uint8))
    for file in folder.files:
        load_file(tmp_path / file)


def test_names_beyond_the_table_are_no_dtypes() -> None:
    with pytest.raises(ValueError, match="'nn'"):
        torch_dtype("nn")


def test_tensors_are_written_in_any_order(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "reference", {"format": "pt"})
    header = make_header([TensorSpec.of(name, tensor) for name, tensor in TENSORS.items()])
    with SafetensorsWriter(tmp_path / "written", header) as writer:
        for name in reversed(TENSORS):
            writer.add(name, TENSORS[name])
    assert (tmp_path / "written").read_bytes() == (tmp_path / "reference").read_bytes()


def test_a_file_that_is_not_completed_leaves_nothing(tmp_path: Path) -> None:
    header = make_header([TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (2,))])
    with (
        pytest.raises(ValueError, match="1 tensors, first b"),
        SafetensorsWriter(tmp_path / "x.safetensors", header) as writer,
    ):
        writer.add("a", torch.zeros(2))
    assert list(tmp_path.iterdir()) == []


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        HfFolder(tmp_path)
    write_folder(tmp_path, {"a": torch.zeros(4)}, {})
    with pytest.raises(KeyError, match="tensor z"):
        HfFolder(tmp_path).get("z")
    file = tmp_path / SINGLE
    whole = file.read_bytes()
    for broken in (
        whole[:-1],
        whole + b"x",
        struct.pack("<Q", 4) + b"nope",
        b"",
    ):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=SINGLE):
            HfFolder(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        HfFolder(tmp_path)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, 3).expand(4, 3)[:0],  # a view of nothing, with a stride of 0
        torch.zeros(1).expand(1),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor(True),
    ],
    ids=lambda tensor: str(tuple(tensor.shape)),
)
def test_bytes_of_any_layout(tensor: torch.Tensor) -> None:
    found = as_bytes(tensor)
    assert found.numpy().tobytes() == tensor.numpy().tobytes()
