"""Source that collects the tensors of all pipeline stages and expert ranks, in one order, on rank 0
(nccl) or on every rank (ipc).

vLLM's `nccl` sends from rank 0 only, its `ipc` shares a copy on every rank's device: the quantized
tensors of the other pipeline stages and expert ranks are sent once more. Buckets are visited in one
order that every rank knows, (stage, dense before experts, expert rank, number), which is each
rank's own order too: this prevents deadlocks between ranks.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.distributed import exchange
from megatron_rl.models.tensors import TensorSpec, as_bytes, torch_dtype
from megatron_rl.weight_sync.buckets import NamedTensors
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import this_rank
from megatron_rl.weight_sync.wire import checksum

Key = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One bucket of one writer."""

    key: Key
    writer: int
    tensors: tuple[TensorSpec, ...]


class UnshardedSource:
    """Source of full tensors. Every rank creates one (collective) and iterates it in lockstep, once
    per sync; it yields on all ranks, or on rank 0 only.
    """

    def __init__(self, source: ShardSource, everywhere: bool) -> None:
        # checksums of the tensors that this rank has yielded
        self.sums: dict[str, Tensor] = {}
        self.shards = source
        self._everywhere = everywhere
        self._rank = this_rank()
        self._mine = source.bucket_keys
        self._steps = self._agree()
        self._parameters: Mapping[str, Tensor] = {}
        self._pass: NamedTensors = iter(())

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Yield the complete model, in the order of iteration, on every rank."""
        return tuple(tensor for step in self._steps for tensor in step.tensors)

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Set this rank's shards for the next pass."""
        self._parameters = parameters
        self.sums = {}
        device = next((tensor.device for tensor in parameters.values()), torch.device("cpu"))
        self._pass = self._walk(device)
        if device.type == "cuda":
            self._pass = made_on(torch.cuda.current_stream(device), self._pass)

    def __iter__(self) -> NamedTensors:
        return self._pass

    def drain(self) -> None:
        """Finish a pass that was interrupted on this rank: the others are still in its
        collectives.
        """
        for _ in self._pass:
            pass

    def _agree(self) -> tuple[Step, ...]:
        mine = [
            asdict(Step(key, self._rank, tensors))
            for key, tensors in zip(self._mine, self.shards.bucket_tensors, strict=True)
            if tensors is not None
        ]
        steps = [
            step for written in exchange(mine) for step in msgspec.convert(written, list[Step])
        ]
        return tuple(sorted(steps, key=lambda step: step.key))

    def _walk(self, device: torch.device) -> NamedTensors:
        buckets = self.shards.buckets(self._parameters)
        mine = set(self._mine)
        for step in self._steps:
            made = dict(next(buckets)) if step.key in mine else {}
            for tensor in step.tensors:
                here = self._deliver(step.writer, tensor, made.get(tensor.name), device)
                if here is not None:
                    self.sums[tensor.name] = checksum(here)
                    yield tensor.name, here

    def _deliver(
        self, writer: int, spec: TensorSpec, tensor: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Send the tensor to the ranks that yield it. A writer that has failed sends zeros: its
        failure drops the version.
        """
        if writer == self._rank and tensor is None:
            tensor = torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device)
        if self._everywhere and dist.is_initialized() and dist.get_world_size() > 1:
            if tensor is not None:
                data = as_bytes(tensor)
            else:
                data = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
            dist.broadcast(data, src=writer)
            return _typed(data, spec)
        if writer == 0 or self._rank not in (0, writer):
            return tensor if self._rank == 0 else None
        if self._rank == writer:
            assert tensor is not None
            dist.send(as_bytes(tensor), dst=0)
            return None
        data = torch.empty(spec.nbytes, dtype=torch.uint8, device=device)
        dist.recv(data, src=writer)
        return _typed(data, spec)


def made_on(home: torch.cuda.Stream, pairs: NamedTensors) -> NamedTensors:
    """Make each (name, tensor) pair on stream `home`, for a consumer on any stream, which then
    waits for it.

    Home is where the optimizer has written the weights. vLLM's packed sender runs on unsynchronized
    streams of its own: made there, a tensor could hold weights of two versions, with a matching
    checksum.
    """
    while True:
        with torch.cuda.stream(home):
            pair = next(pairs, None)
        if pair is None:
            return
        caller = torch.cuda.current_stream()
        caller.wait_stream(home)
        # its memory is not reused on home before the caller has read it
        pair[1].record_stream(caller)
        yield pair


def _typed(data: Tensor, spec: TensorSpec) -> Tensor:
    return data.view(torch_dtype(spec.dtype)).view(spec.shape)
