"""Files of an exported model: numbered over all ranks, with the permissions of the run."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.models.hf_folder import INDEX, HfFolder
from megatron_rl.models.tensors import write_tensors
from megatron_rl.weight_sync.export import _write_index


def test_files_of_several_ranks_are_numbered_in_one_row(tmp_path: Path) -> None:
    for place, name in {"00000-00000": "a", "00000-00001": "b", "00002-00000": "c"}.items():
        save_file({name: torch.ones(2)}, tmp_path / f"{place}.safetensors")
    _write_index(tmp_path)
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == dict(
        zip("abc", names, strict=True)
    )
    assert HfFolder(tmp_path).get("c").tolist() == [1.0, 1.0]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weights_are_as_readable_as_other_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write_tensors({"a": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
        write_tensors({"a": torch.zeros(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert HfFolder(tmp_path).get("a").tolist() == [0.0, 0.0]
