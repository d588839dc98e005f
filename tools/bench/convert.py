"""What conversions cost: time against a copy of the same files, and memory above that of the imported program.

    python tools/bench/convert.py [--gigabytes 4] [--repeats 3] [--folder DISK] [--only import export]

A synthetic model of that size, in several files, goes through every conversion, each in a process of its own, in turn
with a copy of the files that are read; time and memory count from when that has imported everything. *Warm*: what is
read lies in the page cache. *Cold*: it was dropped from there. The copy is synced to disk, as the conversions are. The
best of the repeats is told, and the most memory, of which pages of mapped files are a part (VmHWM).
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

from megatron_rl.checkpoint.torch_dist.reader import hf_shapes
from megatron_rl.models.hf_folder import INDEX, index_of, packed
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import TensorSpec, write_tensors
from megatron_rl.runs.console import table
from megatron_rl.workshop.conversion import (
    dequantized,  # noqa: F401 - not measured
    exports,  # noqa: F401 - not measured
    imports,  # noqa: F401 - not measured
    quantized,  # noqa: F401 - not measured
)

LAYER_GB = 0.2013  # of the sizes below


COMMANDS = {
    "import": (["import"], ["hf"]),
    "export": (["export"], ["checkpoint"]),
    "quantize int8": (["quantize", "--format", "int8"], ["hf"]),
    "quantize fp8": (["quantize", "--format", "fp8"], ["hf"]),
    "quantize fp8_block": (["quantize", "--format", "fp8_block"], ["hf"]),
    "dequantize int8": (["dequantize"], ["int8"]),
    "dequantize fp8_block": (["dequantize"], ["fp8_block"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: a temporary one)")
    parser.add_argument("--warm", action="store_true", help="only what lies in the page cache")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS), metavar="CONVERSION")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-", dir=options.folder) as name:
        os.chdir(name)
        made(Path("hf"), options.gigabytes)
        run("import", "hf", "checkpoint")
        for form in ("int8", "fp8_block"):
            run("quantize", "hf", form, "--format", form)
        size = sum(file.stat().st_size for file in Path("hf").iterdir())
        rows = []
        for said in options.only:
            (command, *more), sources = COMMANDS[said]
            row, most = [said], 0
            for cold in (False,) if options.warm else (False, True):
                copy_s, convert_s = [], []
                for _ in range(options.repeats):
                    copy_s.append(copied(sources, cold))
                    seconds, grown = measured([command, *sources, "out", *more], sources, cold)
                    convert_s.append(seconds)
                    most = max(most, grown)
                row += [f"{min(convert_s):.2f}", f"{min(copy_s) / min(convert_s):.2f}"]
            rows.append((*row, f"{most / 1e6:.0f}"))
        largest = max(spec.nbytes for spec in specs(options.gigabytes)[0])
        print(f"{size / 1e9:.2f} GB, the largest tensor {largest / 1e6:.0f} MB")
        states = ("warm s", "copy / it") if options.warm else ("warm s", "copy / it", "cold s", "copy / it")
        print("\n".join(table(("", *states, "MB above the program"), rows)))


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
    folder.mkdir(parents=True, exist_ok=True)
    files = packed(wanted, 1 << 30)
    for file, held in files.items():
        tensors = {spec.name: torch.randn(spec.shape, dtype=torch.bfloat16).mul_(0.02) for spec in held}
        write_tensors(tensors, folder / file, {"format": "pt"})
    if len(files) > 1:
        (folder / INDEX).write_text(json.dumps(index_of(files)))
    (folder / "config.json").write_text(json.dumps(config))


def copied(sources: list[str], cold: bool) -> float:
    """Seconds, in this process."""
    prepare(sources, cold)
    started = time.perf_counter()
    for place, source in enumerate(sources):
        target = Path("out", str(place))
        target.mkdir(parents=True)
        for file in filter(Path.is_file, Path(source).iterdir()):
            shutil.copyfile(file, target / file.name)
            with (target / file.name).open() as opened:
                os.fsync(opened.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree("out")
    return seconds


def prepare(sources: list[str], cold: bool) -> None:
    """The page cache holds the files, or none of them."""
    for file in (path for source in sources for path in Path(source).iterdir() if path.is_file()):
        with file.open("rb", buffering=0) as opened:
            if cold:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(1 << 24):
                    pass


def measured(words: list[str], sources: list[str], cold: bool) -> tuple[float, int]:
    """Seconds, and the bytes that a process of its own grew by."""
    prepare(sources, cold)
    seconds, grown = json.loads(run(*words))
    shutil.rmtree("out")
    return seconds, grown


def run(*words: str) -> str:
    command, env = [sys.executable, __file__, "--measure", *words], os.environ | convert.LARGE_PAGES
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise SystemExit(f"{words[0]}: {done.stderr.strip()}")
    return done.stdout.splitlines()[-1]


def measure(words: list[str]) -> int:
    """In the process of its own."""
    convert.tune_memory()
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
