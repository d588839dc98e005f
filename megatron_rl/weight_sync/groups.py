"""The two collectives a sync needs, and where a rank finds the groups to run them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_rl.models.layout import Place


class Group(Protocol):
    """The ranks that share a parameter."""

    def max_(self, tensor: torch.Tensor) -> None:
        """Replace by the element-wise maximum over the group."""

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor], rank: int) -> None:
        """Fill `received` on the group's first rank with the tensors of the others, in order; empty elsewhere."""


@dataclass(frozen=True)
class TorchGroup:
    handle: dist.ProcessGroup | None = None  # None: the world

    def max_(self, tensor: torch.Tensor) -> None:
        if dist.is_initialized():  # a lone process need not be
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.handle)

    def gather(self, tensor: torch.Tensor, received: Sequence[torch.Tensor], rank: int) -> None:
        # point to point: a collective would copy the first rank's own share as well
        if rank:
            dist.send(tensor, group=self.handle, group_dst=0)
            return
        pending = [
            dist.irecv(buffer, group=self.handle, group_src=source) for source, buffer in enumerate(received, start=1)
        ]
        for work in pending:
            if work is not None:
                work.wait()


@dataclass(frozen=True)
class Ranks:
    """This rank's place in the layout and the groups it shares parameters with."""

    place: Place = field(default_factory=Place)
    tensor: Group = field(default_factory=TorchGroup)
    expert_tensor: Group = field(default_factory=TorchGroup)
    world: Group = field(default_factory=TorchGroup)

    @classmethod
    def from_megatron(cls) -> Ranks:
        from megatron.core import parallel_state as mpu

        return cls(
            Place(
                tp=mpu.get_tensor_model_parallel_rank(),
                pp=mpu.get_pipeline_model_parallel_rank(),
                ep=mpu.get_expert_model_parallel_rank(),
                etp=mpu.get_expert_tensor_parallel_rank(),
                dp=mpu.get_data_parallel_rank(with_context_parallel=True),
                edp=mpu.get_expert_data_parallel_rank(),
            ),
            TorchGroup(mpu.get_tensor_model_parallel_group()),
            TorchGroup(mpu.get_expert_tensor_parallel_group()),
        )
