"""A worker extension for tests alone: `nccl` on hosts. In the place of vLLM's NCCL communicator stands one over gloo,
with its name, its rendezvous and its ranks; the engine that is named by a file FLIP gets one byte wrong.
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

from megatron_rl.engine.vllm_receiver import WorkerExtension

FLIP = "MEGATRON_RL_TESTS_FLIP"  # of the environment: where the file is that holds a rank


class GlooCommunicator:
    def __init__(self, group: StatelessProcessGroup, device: Any) -> None:
        self.rank = group.rank
        store = dist.PrefixStore("gloo", group.store)
        self._group = dist.ProcessGroupGloo(store, group.rank, group.world_size, timedelta(seconds=120))

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        data = tensor.reshape(-1).view(torch.uint8)
        self._group.broadcast([data], options).wait()
        marker = Path(os.environ[FLIP])
        if marker.exists() and marker.read_text() == str(self.rank):
            marker.unlink()
            data[0] ^= 1

    def destroy(self) -> None:
        pass


def take_nccl_s_place() -> None:
    """In this process: the communicator, and what vLLM asks of a device that is not there."""
    pynccl.PyNcclCommunicator = GlooCommunicator  # type: ignore[assignment,misc]
    nccl_common.unpinned_nccl_env = nullcontext
    torch.accelerator.current_device_index = lambda: 0
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)  # type: ignore[assignment,return-value]


class GlooExtension(WorkerExtension):
    pass


take_nccl_s_place()
