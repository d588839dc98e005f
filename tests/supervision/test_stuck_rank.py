"""Two real ranks: one lets the other wait for long, and is waited for; then it does not come, and
is named.

`python test_stuck_rank.py RANK FOLDER` is one of them: rank 0 lets the other wait for longer than
torch would.
"""

import faulthandler
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from preloaded import Process

from megatron_rl.distributed import receive_size, set_wait_policy, waited_for
from megatron_rl.processes import heartbeat
from megatron_rl.processes.heartbeat import Heartbeat, file_of
from megatron_rl.processes.process import SHOW_STACKS
from megatron_rl.supervision.watch import HangDetector, kill

PATIENCE_S = 240
LIMIT_S = 10.0  # of torch
SIZE = 42


def forget_to_come() -> None:
    time.sleep(1000)


def main(rank: int, folder: Path) -> None:
    faulthandler.register(SHOW_STACKS, all_threads=True, file=(folder / f"stacks_{rank}").open("w"))
    heartbeat.BEAT_S = 0.5
    beats = Heartbeat(folder, rank)
    beats.each.append(set_wait_policy)
    beats.start()
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=LIMIT_S)
    )
    with heartbeat.phase("rollout"):
        if rank:
            (folder / "received").write_text(str(receive_size()))
        else:
            with waited_for():
                time.sleep(1.5 * LIMIT_S)
            dist.broadcast(torch.tensor([SIZE]), src=0)
    with heartbeat.phase("update"):
        if rank == 0:
            forget_to_come()
        dist.all_reduce(torch.ones(1))


@pytest.mark.ranks
@pytest.mark.fault(
    "a rank does not come to a collective", "it is named with its stack, the one that waits is not"
)
def test_a_stuck_rank(tmp_path: Path) -> None:
    file_of(tmp_path, 0).parent.mkdir(parents=True)
    ranks = [
        Process(
            "torch",
            [
                sys.executable,
                __file__,
                str(rank),
                str(tmp_path),
            ],
        )
        for rank in range(2)
    ]
    try:
        watch = HangDetector(tmp_path, 4.0)
        deadline = time.monotonic() + PATIENCE_S
        while not watch.blocking or watch.blocking[0].phase != "update":
            assert time.monotonic() < deadline
            assert [one.poll() for one in ranks] == [None, None]
            watch.look()
            time.sleep(0.2)
        (hung,) = watch.blocking
        assert hung.process == "rank 0"
        assert (tmp_path / "received").read_text() == str(SIZE)
        kill(hung)
        assert "forget_to_come" in (tmp_path / "stacks_0").read_text()
    finally:
        for one in ranks:
            one.kill()
            one.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
