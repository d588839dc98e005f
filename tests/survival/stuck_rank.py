"""One of two ranks: RANK FOLDER. Rank 0 lets the other wait for longer than torch would, then does not come."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_rl.distributed import receive_size, tell_to_wait, waited_for
from megatron_rl.processes import pulse

LIMIT_S = 10.0  # of torch
SIZE = 42


def forget_to_come() -> None:
    time.sleep(1000)


def main(rank: int, folder: Path) -> None:
    pulse.BEAT_S = 0.5
    beats = pulse.Beats(folder, rank)
    beats.each.append(tell_to_wait)
    beats.start()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S))
    with pulse.phase("rollout"):
        if rank:
            (folder / "received").write_text(str(receive_size()))
        else:
            with waited_for():
                time.sleep(1.5 * LIMIT_S)
            dist.broadcast(torch.tensor([SIZE]), src=0)
    with pulse.phase("update"):
        if rank == 0:
            forget_to_come()
        dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
