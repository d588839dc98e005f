"""Ceilings of this GPU: matrix products of Qwen3-0.6B's shapes, a copy, the cost of a launch.

Writes OUT/machine.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from results import Results, demand_gpu

TOKENS = 14900  # of a pack
# tokens x in x out: a large one, attention, MLP, a part of the output layer, a weight's gradient
PRODUCTS = (
    (8192, 8192, 8192),
    (TOKENS, 1024, 4096),
    (TOKENS, 2048, 1024),
    (TOKENS, 1024, 6144),
    (TOKENS, 3072, 1024),
    (TOKENS, 1024, 3456),
    (4096, TOKENS, 1024),
)
LAUNCHES = 20000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    results = Results(options.out / "machine.jsonl")

    import torch

    demand_gpu()

    def seconds(call: Callable[[], Any], repeats: int = 10) -> float:
        call()
        torch.cuda.synchronize()
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / repeats / 1e3

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    results.note(
        "versions",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        device=torch.cuda.get_device_name(),
        cudnn=torch.backends.cudnn.version(),
        nccl=torch.cuda.nccl.version(),
    )
    for rows, inner, columns in PRODUCTS:
        left = matrix(rows, inner)
        right = matrix(columns, inner)
        spent = seconds(lambda left=left, right=right: left @ right.t())
        rate = 2 * rows * inner * columns / spent / 1e12
        results.note(f"product {rows} x {inner} x {columns}", tflops=round(rate))

    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
    target = source.clone()
    spent = seconds(lambda: target.copy_(source))
    results.note("copy", tb_per_s=round(2 * source.nbytes / spent / 1e12, 2))

    small = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(LAUNCHES):
        small.add_(1)
    results.note("launch", us=round((time.perf_counter() - began) / LAUNCHES * 1e6, 2))


if __name__ == "__main__":
    main()
