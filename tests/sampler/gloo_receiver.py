"""A worker extension for tests alone: gloo in NCCL's place. The rank that a file FLIP names gets
one byte wrong.
"""

import os
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import pynccl
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_common

from megatron_rl.engine.vllm_receiver import WorkerExtension as GlooExtension  # noqa: F401

# of the environment: where the file is that holds a rank, in engines alone
FLIP = "MEGATRON_RL_TESTS_FLIP"


class GlooCommunicator:
    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.rank = group.rank
        store = dist.PrefixStore("gloo", group.store)
        self._group = dist.ProcessGroupGloo(
            store, group.rank, group.world_size, timedelta(seconds=120)
        )

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = src
        options.rootTensor = 0
        data = tensor.reshape(-1).view(torch.uint8)
        self._group.broadcast([data], options).wait()
        marker = Path(os.environ[FLIP])
        if marker.exists() and marker.read_text() == str(self.rank):
            marker.unlink()
            data[0] ^= 1


# the communicator, and what vLLM asks of a device that is not there
PLACES: list[tuple[Any, str, Any]] = [
    (pynccl, "PyNcclCommunicator", GlooCommunicator),
    (nccl_common, "unpinned_nccl_env", nullcontext),
    (torch.accelerator, "current_device_index", lambda: 0),
    (torch.cuda, "current_stream", lambda device=None: SimpleNamespace(synchronize=lambda: None)),
]


if FLIP in os.environ:  # in an engine
    for place in PLACES:
        setattr(*place)
