"""Sum of a tensor over a job's nodes (NCCL or gloo) for seconds, to see that they reach each other as a learner needs.

python -m megatron_rl.workshop.nodes.ring [cuda]     one process for each GPU, or for each node without; started by
                                                     attend.py. cuda: where torch sees no GPU, an end
RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_rl.processes import gpu_driver

SECONDS = {"cuda": 3.0, "cpu": 0.3}
LIMIT = timedelta(seconds=120)
ELEMENTS = {"cuda": 1 << 26, "cpu": 1 << 18}  # 256 MiB, 1 MiB


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if "cuda" in sys.argv[1:] and device != "cuda":
        sys.exit(gpu_driver.unseen())
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=LIMIT)
    begun = time.monotonic()
    going = torch.ones(1, device=device)
    while going.item():
        values = torch.full((ELEMENTS[device],), float(rank + 1), device=device)
        dist.all_reduce(values)
        if not bool((values == world * (world + 1) / 2).all()):
            sys.exit(f"a sum over {world} processes came out wrong on GPU {os.environ['LOCAL_RANK']}")
        going.fill_(float(time.monotonic() - begun < SECONDS[device]))
        dist.all_reduce(going, dist.ReduceOp.MIN)  # all stop at the same time
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
