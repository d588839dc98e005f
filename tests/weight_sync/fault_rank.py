"""Processes of test_faults: learner ranks that are killed, a rank whose disk fills up."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from push_rank import RankWeights, Receiver, error_of, join_pair, sync_of

from megatron_rl.weight_sync import source
from megatron_rl.weight_sync.file_transport import version_directory

WHOLE_TENSORS = source.full_tensors


def when_some_are_written(
    folder: Path, act: Callable[[], None]
) -> Callable[..., Iterator[tuple[str, torch.Tensor]]]:
    """`full_tensors`, with something that happens in the middle of it, once bytes lie in the
    version's files.
    """

    def tensors(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for number, pair in enumerate(WHOLE_TENSORS(*arguments)):
            yield pair
            if number == 4:
                while not any(path.stat().st_size for path in folder.glob("*.bin")):
                    time.sleep(0.01)
                act()

    return tensors


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_rank(rank: int, rendezvous: str, folder: str, victim: int) -> dict[str, Any]:
    """Two versions; the victim does not live to see the second."""
    sync, _, receiver = join_pair(rank, rendezvous, folder)
    sync.push(1)
    if rank == victim == 0:
        source.full_tensors = when_some_are_written(
            version_directory(sync.transport.directory, 2), kill_myself
        )
    elif rank == victim:
        source.gather = lambda *arguments: kill_myself()
    message = error_of(sync, 2)
    sync.close()
    return {"message": message, "calls": receiver.calls}


def full_disk(folder: Path) -> None:
    """On a file system that is a little larger than one version: once full before the start, once
    in the middle.
    """
    receiver = Receiver()
    filler = folder / "filler"
    errors = []
    sync = sync_of(RankWeights(0, 1), receiver, folder)

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(b"\1" * 4096):
                    pass
            except OSError:
                return

    def push(version: int) -> None:
        errors.append(error_of(sync, version))
        filler.unlink(missing_ok=True)

    push(1)
    fill()
    push(2)
    source.full_tensors = when_some_are_written(
        version_directory(sync.transport.directory, 3), fill
    )
    push(3)
    source.full_tensors = WHOLE_TENSORS
    left = sorted(path.name for path in sync.transport.directory.iterdir())
    push(4)
    print(json.dumps({"errors": errors, "left": left, "calls": receiver.calls}))


if __name__ == "__main__":
    full_disk(Path(sys.argv[1]))
