"""Time and memory of `tools/prepare_data.py` on two million rows, and of loading what it wrote:

    python tools/bench/prepare.py [--rows 2000000] [--distinct 2000000] [--format parquet|jsonl]

Each half runs in a process of its own, whose largest resident size is told. Rows are as verl publishes DAPO-Math-17k.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TEXT = "Solve the following problem step by step. Let n be a positive integer whose digits sum to {}. " * 3
LOAD = """
import sys, time
from megatron_rl.config.schema import DataSection
from megatron_rl.data.prompts import PromptOrder
from megatron_rl.data.prompts import load_dataset
from megatron_rl.data.tokenizer import FolderTokenizer
from megatron_rl.data.toy import write_toy
from pathlib import Path
folder = Path(sys.argv[1])
write_toy(folder / "toy")
begun, used = time.perf_counter(), time.process_time()
tokenizer = FolderTokenizer(folder / "toy" / "model")
found = load_dataset("train", DataSection(train=sys.argv[2]), tokenizer, 2048, needs_answer=True)
print(found.describe(), file=sys.stderr)
print("seconds", time.perf_counter() - begun, time.process_time() - used)
order = PromptOrder(found, 1, True)
order.take(1)
begun = time.perf_counter()
order.take(512)
print("draw of 512:", time.perf_counter() - begun, "s", file=sys.stderr)
"""


def make(path: Path, rows: int, distinct: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def row(number: int) -> dict:
        number %= distinct
        return {
            "data_source": "math_dapo", "prompt": [{"content": TEXT.format(number, number, number), "role": "user"}],
            "ability": "MATH", "reward_model": {"ground_truth": str(number % 977), "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"9a9b6eb4-a1cb-49d1-8c1e-{number:012d}"},
        }  # fmt: skip

    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(json.dumps(row(number)) + "\n" for number in range(rows))
        return
    schema = pa.Table.from_pylist([row(0)]).schema
    with pq.ParquetWriter(path, schema) as file:
        for first in range(0, rows, 100_000):
            file.write_table(
                pa.Table.from_pylist([row(each) for each in range(first, min(rows, first + 100_000))], schema)
            )


def measured(what: str, command: list[str]) -> None:
    begun = time.perf_counter()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    watched = (
        "import resource,subprocess,sys; r=subprocess.run(sys.argv[1:]).returncode; "
        "print('MiB', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10); sys.exit(r)"
    )
    subprocess.run([sys.executable, "-c", watched, *command], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{what}: {time.perf_counter() - begun:.1f} s by the clock, {used:.1f} s of CPU", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--distinct", type=int, default=2_000_000)
    parser.add_argument("--format", choices=["parquet", "jsonl"], default="parquet")
    options = parser.parse_args()
    tool = Path(__file__).parents[1] / "prepare_data.py"
    with tempfile.TemporaryDirectory(prefix="megatron-rl-bench-") as name:
        given, made = Path(name) / f"rows.{options.format}", Path(name) / "made.parquet"
        make(given, options.rows, options.distinct)
        print(f"{given.stat().st_size >> 20} MiB")
        measured("prepare", [sys.executable, str(tool), "dapo_math_17k", str(given), "-o", str(made)])
        measured("load", [sys.executable, "-c", LOAD, name, str(made)])


if __name__ == "__main__":
    main()
