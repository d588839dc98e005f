"""A conversion holds a few tensors, not the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import config_of, convert, done, made

WORKER = Path(__file__).parent / "memory_worker.py"
CONVERSIONS = {
    "import": (["import"], ["hf"]),
    "export": (["export"], ["checkpoint"]),
    "quantize to int8": (["quantize", "--format", "int8"], ["hf"]),
    "quantize to fp8": (["quantize", "--format", "fp8"], ["hf"]),
    "quantize to fp8_block": (["quantize", "--format", "fp8_block"], ["checkpoint"]),
    "dequantize int8": (["dequantize"], ["int8"]),
    "dequantize fp8_block": (["dequantize"], ["fp8_block"]),
}
MOST = 100e6  # of each of two threads: what megatron joins, what that is made of, and the steps of rounding


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Of a model of 136 MB, whose largest tensor has 8.4 MB, and 17 MB as megatron joins it."""
    folder = tmp_path_factory.mktemp("sizes")
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1000, "head_dim": 64}
    for name, config in {
        "large": config_of("llama", **wide) | {"num_hidden_layers": 5},
        "small": config_of("llama"),
    }.items():
        made(folder / name / "hf", config)
        done("import", folder / name / "hf", folder / name / "checkpoint")
        for form in ("int8", "fp8_block"):
            done("quantize", folder / name / "hf", folder / name / form, "--format", form)
    assert sum(file.stat().st_size for file in (folder / "large" / "hf").iterdir()) > 130e6

    def words(name: str, size: str) -> list[str]:
        (command, *options), sources = CONVERSIONS[name]
        target = folder / size / f"of {name}"
        return [command, *(str(folder / size / source) for source in sources), str(target), *options]

    asked = "".join(json.dumps([words(name, "small"), words(name, "large")]) + "\n" for name in CONVERSIONS)
    told = subprocess.run(
        [sys.executable, str(WORKER)], input=asked, capture_output=True, text=True, check=False,
        env=os.environ | convert.LARGE_PAGES | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert told.returncode == 0, told.stderr
    return dict(zip(CONVERSIONS, map(int, told.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("name", CONVERSIONS)
def test_memory(peaks: dict[str, int], name: str) -> None:
    assert peaks[name] < MOST, peaks
