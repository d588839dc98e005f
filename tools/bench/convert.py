"""What conversions cost: time against a copy of the same files, and memory above that of the imported program.

    python tools/bench/convert.py [--gigabytes 4] [--repeats 3]

A synthetic model of that size, in several files, is imported, exported, quantized and verified, each in a process of
its own; time and memory count from when that has imported everything. The copy is synced to disk, as the conversions
are. The best of the repeats is told.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import convert

from megatron_rl.conversion import exports, imports, quantize_command, verification  # noqa: F401 - before the measurement
from megatron_rl.models.hf_folder import HfFolderWriter
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import TensorSpec
from megatron_rl.models.torch_dist import hf_shapes
from megatron_rl.runs.console import table

LAYER_GB = 0.2013  # of the sizes below


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-", dir=options.folder) as name:
        folder = Path(name)
        made(folder / "hf", options.gigabytes)
        size = sum(file.stat().st_size for file in (folder / "hf").iterdir())
        copy_s = min(copied(folder) for _ in range(options.repeats))
        commands = {
            "import": ["import", "hf", "out"],
            "export": ["export", "checkpoint", "out"],
            "quantize int8": ["quantize", "hf", "out", "--format", "int8"],
            "quantize fp8": ["quantize", "hf", "out", "--format", "fp8"],
            "verify": ["verify", "hf", "int8", "--report", "out"],
        }
        os.chdir(folder)
        convert.main(["import", "hf", "checkpoint"])
        convert.main(["quantize", "hf", "int8", "--format", "int8"])
        rows = [("copy", f"{size / copy_s / 1e6:.0f}", "1.00", "")]
        for said, words in commands.items():
            runs = [measured(words) for _ in range(options.repeats)]
            seconds, peak = min(run[0] for run in runs), max(run[1] for run in runs)
            rows.append((said, f"{size / seconds / 1e6:.0f}", f"{copy_s / seconds:.2f}", f"{peak / 1e6:.0f}"))
        largest = max(spec.nbytes for spec in specs(options.gigabytes)[0])
        print(f"{size / 1e9:.2f} GB, the largest tensor {largest / 1e6:.0f} MB")
        print("\n".join(table(("", "MB/s", "of the copy's speed", "MB above the program"), rows)))


def specs(gigabytes: float) -> tuple[list[TensorSpec], dict[str, Any]]:
    config = {
        "model_type": "qwen3", "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 64000, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "num_hidden_layers": max(1, round((gigabytes - 0.52) / LAYER_GB)),
    }  # fmt: skip
    sizes = hf_shapes(ModelShape.from_hf(config))
    return [TensorSpec(name, "bfloat16", size) for name, size in sizes.items()], config


def made(folder: Path, gigabytes: float) -> None:
    wanted, config = specs(gigabytes)
    with HfFolderWriter(folder, wanted, max_file_bytes=1 << 30) as writer:
        for spec in wanted:
            writer.add(spec.name, torch.randn(spec.shape, dtype=torch.bfloat16).mul_(0.02))
    (folder / "config.json").write_text(json.dumps(config))


def copied(folder: Path) -> float:
    started = time.perf_counter()
    (folder / "copy").mkdir()
    for file in (folder / "hf").iterdir():
        shutil.copyfile(file, folder / "copy" / file.name)
        with (folder / "copy" / file.name).open() as opened:
            os.fsync(opened.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(folder / "copy")
    return seconds


def measured(words: list[str]) -> tuple[float, int]:
    """Seconds, and the bytes that a process of its own grew by."""
    done = subprocess.run([sys.executable, __file__, "--measure", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]}: {done.stderr.strip()}")
    seconds, grown = json.loads(done.stdout.splitlines()[-1])
    out = Path("out")
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return seconds, grown


def measure(words: list[str]) -> int:
    """In the process of its own."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before, started = held("VmRSS"), time.perf_counter()
    status = convert.main(words)
    print(json.dumps([time.perf_counter() - started, held("VmHWM") - before]))
    return status


def held(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        sys.exit(measure(sys.argv[2:]))
    main()
