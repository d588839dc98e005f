"""Process of the learner: joins torch's and megatron-core's groups, checks its place in the layout,
sums over ranks and broadcasts the driver's tensors and JSON.
"""

import ipaddress
import json
import math
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.learner.modules import cpu  # before megatron

from megatron.core import parallel_state, tensor_parallel  # isort: skip

from megatron_rl.batch import Batch
from megatron_rl.config.schema import LearnerSection
from megatron_rl.distributed import TorchGroup, exchange, receive_size
from megatron_rl.models.layout import Layout, Place
from megatron_rl.models.shards import ShardGroups
from megatron_rl.models.tensors import as_bytes, dtype_name, torch_dtype
from megatron_rl.processes.threads import limit_new_threads_to_one_core

RENDEZVOUS = "MEGATRON_RL_RENDEZVOUS"
# keys of JSON objects that stand for what JSON lacks
TENSOR = "__tensor__"
BATCH = "__batch__"


class LearnerRank:
    """This process among the learner's: its place, and the collectives that the learner uses."""

    def __init__(
        self, learner: LearnerSection, layout: Layout, seed: int, collective_s: float
    ) -> None:
        """`collective_s`: timeout of a collective; a dead rank is noticed earlier."""
        self.limit = timedelta(seconds=collective_s)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.layout = layout
        self._check(learner)
        self.place = layout.place(self.rank)
        self.is_driver = self.rank == 0
        self.first_stage = self.place.pp == 0
        self.last_stage = self.place.pp == layout.pp - 1
        # one rank per replica speaks for its loss: the last stage's first one
        self.reports = self.last_stage and self.place.tp == self.place.cp == 0
        # ranks of one machine share its cores: more threads would wait
        if "OMP_NUM_THREADS" not in os.environ:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
        limit_new_threads_to_one_core()  # gloo's
        try:
            _join(self.rank, self.world_size, self.limit)
            # rank 0 joins once a colocated engine sleeps; no GPU is used before
            self.device = _device()
            self.groups = self._form_groups(learner)
        except dist.DistStoreError as error:
            place = os.environ.get(RENDEZVOUS, "MASTER_ADDR")
            raise RuntimeError(
                f"the learner's ranks cannot meet in {place}: {error}. Where the temporary folder "
                "is full, free space there, or set TMPDIR to another one"
            ) from error
        require_same_place(self.place)
        self.replicas = ReplicaSums(self)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)

    def _form_groups(self, learner: LearnerSection) -> ShardGroups:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=learner.tensor_parallel,
            pipeline_model_parallel_size=learner.pipeline_parallel,
            virtual_pipeline_model_parallel_size=self.layout.vp,
            context_parallel_size=learner.context_parallel,
            expert_model_parallel_size=learner.expert_parallel,
            expert_tensor_parallel_size=self.layout.etp,
            distributed_timeout_minutes=math.ceil(self.limit.total_seconds() / 60),
            create_gloo_process_groups=not cpu.ON_CPU,
        )
        return ShardGroups(
            self.place,
            tensor=TorchGroup(parallel_state.get_tensor_model_parallel_group()),
            expert_tensor=TorchGroup(parallel_state.get_expert_tensor_parallel_group()),
        )

    def _check(self, learner: LearnerSection) -> None:
        if self.world_size != self.layout.world:
            raise ValueError(
                f"the learner's layout needs {self.layout.world} processes (tensor_parallel "
                f"{learner.tensor_parallel} x pipeline_parallel {learner.pipeline_parallel} x "
                f"context_parallel {learner.context_parallel} x data_parallel "
                f"{learner.data_parallel}), but WORLD_SIZE is {self.world_size}: start that many, "
                "or change learner.data_parallel"
            )

    def sum(self, tensor: Tensor) -> Tensor:
        dist.all_reduce(tensor)
        return tensor

    def add_up(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Sum per name over all ranks, in rank order on every rank; a rank may lack names."""
        total: dict[str, float] = {}
        for part in exchange(dict(numbers)):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def broadcast(self, value: Any = None) -> Any:
        """Return the driver's value on every rank: tensors, Batch, and plain JSON values around
        them.
        """
        tensors: list[Tensor] = []
        if self.world_size == 1:
            return value
        if not self.is_driver:
            data = torch.empty(receive_size(), dtype=torch.uint8)
            dist.broadcast(data, src=0)
            return json.loads(bytes(data.tolist()), object_hook=_received)
        header = json.dumps(value, default=partial(_described, tensors)).encode()
        dist.broadcast(torch.tensor([len(header)]), src=0)
        dist.broadcast(torch.frombuffer(bytearray(header), dtype=torch.uint8), src=0)
        for tensor in tensors:
            dist.broadcast(tensor, src=0)
        return value


class ReplicaSums:
    """Sums over replicas, each of which has one rank that counts."""

    def __init__(self, ranks: LearnerRank) -> None:
        self.place = ranks.place.replica
        self._ranks = ranks

    def sum(self, values: Tensor) -> Tensor:
        return self._ranks.sum(values.clone() if self._ranks.reports else torch.zeros_like(values))

    def largest(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        """[K, n] of each replica; n may differ."""
        gathered = exchange(values.tolist() if self._ranks.reports else None)
        return [torch.tensor(one, dtype=values.dtype) for one in gathered if one is not None]


def require_same_place(ours: Place) -> None:
    """Raise on every rank if a rank's place differs from megatron-core's: it would load one shard
    and send another.
    """
    megatrons = Place(
        tp=parallel_state.get_tensor_model_parallel_rank(),
        pp=parallel_state.get_pipeline_model_parallel_rank(),
        ep=parallel_state.get_expert_model_parallel_rank(),
        etp=parallel_state.get_expert_tensor_parallel_rank(),
        dp=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        edp=parallel_state.get_expert_data_parallel_rank(),
        cp=parallel_state.get_context_parallel_rank(),
        replica=parallel_state.get_data_parallel_rank(),
    )
    answers = exchange(
        None if ours == megatrons else f"{ours} by our layout, {megatrons} by megatron-core"
    )
    wrong = [f"rank {rank} is at {places}" for rank, places in enumerate(answers) if places]
    if wrong:
        raise RuntimeError(
            f"the learner's ranks are in another order than megatron-core's: {wrong[0]} "
            f"({len(wrong)} of {len(answers)} ranks differ). models/layout.py restates its order: "
            "bring the two together before a run"
        )


def _described(tensors: list[Tensor], value: Any) -> dict[str, Any]:
    """JSON for a value that has none of its own; tensors are set aside in order."""
    if isinstance(value, Tensor):
        tensors.append(as_bytes(value.cpu()))  # gloo knows few dtypes
        return {TENSOR: dtype_name(value.dtype), "shape": list(value.shape)}
    if isinstance(value, Batch):
        return {BATCH: value.columns}
    raise TypeError(
        f"cannot broadcast a {type(value).__name__}: tensors, Batch and JSON values only"
    )


def _received(value: dict[str, Any]) -> Any:
    """The value that `_described` describes; tensors are received in order."""
    if TENSOR in value:
        tensor = torch.empty(value["shape"], dtype=torch_dtype(value[TENSOR]))
        dist.broadcast(as_bytes(tensor), src=0)
        return tensor
    if BATCH in value:
        return Batch(**value[BATCH])
    return value


def _device() -> torch.device:
    if cpu.ON_CPU:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _join(rank: int, world_size: int, limit: timedelta) -> None:
    if dist.is_initialized():
        return
    # tensors in CPU memory use gloo even if NCCL reduces the gradients
    backend = "gloo" if cpu.ON_CPU else "cpu:gloo,cuda:nccl"
    if world_size == 1:
        # no other rank to find: a store in this process opens no port
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit
        )
        return
    # ranks that were launched here meet in a file; torchrun and srun give an address instead
    meeting = os.environ.get(RENDEZVOUS, "env://")
    # torchrun has a store already
    own = meeting == "env://" and "TORCHELASTIC_RUN_ID" not in os.environ
    found = {"store": _store(rank, world_size, limit)} if own else {"init_method": meeting}
    dist.init_process_group(backend, **found, rank=rank, world_size=world_size, timeout=limit)


def _store(rank: int, world_size: int, limit: timedelta) -> dist.TCPStore:
    """Rank 0's store, which listens on the interface of MASTER_ADDR alone; torch by itself would on
    all of them.
    """
    host = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    listener = None
    if rank == 0:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # a node's own name may resolve to loopback there, which other nodes cannot reach
        if address[0] == host or not ipaddress.ip_address(address[0]).is_loopback:
            listener = socket.create_server(address[:2], family=family).detach()
    return dist.TCPStore(host, port, world_size, rank == 0, limit, master_listen_fd=listener)


def leave() -> None:
    """Destroy the process groups, so that another learner may be created in this process."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
