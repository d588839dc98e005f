"""Small models of every family on disk, the converter as a function, and a run's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import convert
import pytest
import torch
from simulated import hf_config, random_hf

from megatron_rl.models.hf_folder import HfFolder, write_folder
from megatron_rl.models.shape import FAMILIES, ModelShape

ROOT = Path(__file__).parents[3]
ALL = sorted(FAMILIES)


def done(*words: object) -> None:
    assert convert.main([str(word) for word in words]) == 0


def fails(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Return the error output of a failing conversion."""
    assert convert.main([str(word) for word in words]) == 1
    return capsys.readouterr().err


def verdicts(tmp_path: Path, *words: object) -> dict[str, int]:
    """Number of tensors per verdict of `verify`, which finds no difference."""
    done("verify", *words, "--report", tmp_path / "parity.json")
    return json.loads((tmp_path / "parity.json").read_text())["tensors"]


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return hf_config(family, num_hidden_layers=2, rms_norm_eps=1e-6, rope_theta=10000.0, **changes)


def made(
    folder: Path,
    config: dict[str, Any],
    seed: int = 0,
    file_bytes: int = 1 << 30,
    scale: float = 0.1,
) -> Path:
    """BF16 weights, norms near one."""
    shape = ModelShape.from_hf(config)
    tensors = {
        name: (
            1 + 0.02 * tensor if tensor.ndim == 1 and not name.endswith("bias") else scale * tensor
        ).bfloat16()
        for name, tensor in random_hf(shape, torch.float32, seed).items()
    }
    write_folder(folder, tensors, config, file_bytes)
    return folder


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    opened = HfFolder(folder)
    return {name: opened.read(name) for name in opened.names}


def content(folder: Path) -> dict[str, bytes]:
    """Bytes of each file, except of the report on the conversion."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "parity.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
