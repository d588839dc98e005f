"""The files of an exported model are numbered over all ranks."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from megatron_rl.models.hf_folder import INDEX, HfFolder
from megatron_rl.weight_sync.export import _write_index


def test_files_of_several_ranks_are_numbered_in_one_row(tmp_path: Path) -> None:
    for place, name in {"00000-00000": "a", "00000-00001": "b", "00002-00000": "c"}.items():
        save_file({name: torch.ones(2)}, tmp_path / f"{place}.safetensors")
    _write_index(tmp_path)
    names = [f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [*names, INDEX]
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == dict(zip("abc", names, strict=True))
    assert HfFolder(tmp_path).get("c").tolist() == [1.0, 1.0]
