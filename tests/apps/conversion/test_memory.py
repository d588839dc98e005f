"""A conversion holds a few tensors, not the model.

Each is measured in a fork of one process, as the tool is: this file, run as a script that reads
lines of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import config_of, convert, done, made

from megatron_rl.apps.conversion import exports

CONVERSIONS = {
    "import": (["import"], "hf"),
    "export": (["export"], "checkpoint"),
    "quantize to int8": (["quantize", "--format", "int8"], "hf"),
    "quantize to fp8_block": (["quantize", "--format", "fp8_block"], "checkpoint"),
    "dequantize fp8_block": (["dequantize"], "fp8_block"),
}
# what megatron joins, what that is made of, and the steps of rounding
MOST = 80e6


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    """Peak memory for a model of 136 MB, whose largest tensor has 8.4 MB, and 17 MB when joined."""
    folder = tmp_path_factory.mktemp("sizes")
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 1000, "head_dim": 64}
    configs = {
        "large": config_of("llama", **wide) | {"num_hidden_layers": 5},
        "small": config_of("llama"),
    }
    for name, config in configs.items():
        made(folder / name / "hf", config)
        done("import", folder / name / "hf", folder / name / "checkpoint")
        blocks = folder / name / "fp8_block"
        done("quantize", folder / name / "hf", blocks, "--format", "fp8_block")
    assert sum(file.stat().st_size for file in (folder / "large" / "hf").iterdir()) > 130e6

    def words(name: str, size: str) -> list[str]:
        (command, *options), source = CONVERSIONS[name]
        return [
            command,
            str(folder / size / source),
            str(folder / size / f"of {name}"),
            *options,
        ]

    asked = "".join(
        json.dumps([words(name, "small"), words(name, "large")]) + "\n" for name in CONVERSIONS
    )
    result = subprocess.run(
        [sys.executable, __file__],
        input=asked,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    return dict(zip(CONVERSIONS, map(int, result.stdout.splitlines()), strict=True))


def test_memory(peaks: dict[str, int]) -> None:
    assert max(peaks.values()) < MOST, peaks


def main() -> None:
    exports.FILE_BYTES = 20 << 20
    for line in sys.stdin:
        first, words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(peak(first, words))
        if os.waitpid(pid, 0)[1]:
            raise SystemExit(f"{words} failed")


def peak(first: list[str], words: list[str]) -> int:
    """Peak memory of `words`, after `first` has done the imports."""
    answer = sys.stdout
    sys.stdout = sys.stderr
    failed = convert.main(first)
    Path("/proc/self/clear_refs").write_text("5")
    before = held("VmRSS")
    failed |= convert.main(words)
    print(held("VmHWM") - before, file=answer, flush=True)
    return failed


def held(key: str) -> int:
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    )
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    convert.tune_memory()
    main()
