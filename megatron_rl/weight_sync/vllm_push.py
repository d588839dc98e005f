"""vLLM's own transports on learner ranks: `ipc`, `nccl`, through its trainer API. `nccl` is
untested on GPUs.

The only module that imports vLLM on a learner rank, and only when such a transport is chosen.
`Relay` sits between vLLM's trainer engine and the sampler, so that the announcement is sent first
and the seal last (see `wire`), and so that a refusal on rank 0 is raised after the collectives that
other ranks are in.
"""

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from megatron_rl.config.fleet import LOOPBACK, is_loopback
from megatron_rl.config.schema import SamplerSection, SyncSection, Transport
from megatron_rl.distributed import exchange
from megatron_rl.models.tensors import torch_dtype
from megatron_rl.processes.process import free_port
from megatron_rl.weight_sync import buckets, wire
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import Contribution, Push, SamplerClient, this_rank
from megatron_rl.weight_sync.unsharded_source import UnshardedSource
from megatron_rl.weight_sync.wire import Announcement, Seal


class VllmPush(Push):
    """Sender of `ipc` and `nccl`. Rank 0 is vLLM's sender; every rank takes part. Versions are
    full.
    """

    def __init__(
        self,
        source: ShardSource,
        sampler: SamplerClient | None,
        sync: SyncSection,
        engine: SamplerSection,
    ) -> None:
        self._rank = this_rank()
        self._sync = sync
        self._addresses = engine.addresses
        self._patience_s = engine.request_timeout_s
        self._workers = engine.engines * engine.tensor_parallel
        self._relay = Relay(sampler)
        self._source = UnshardedSource(source, everywhere=sync.transport == Transport.ipc)
        self._engine: TrainerWeightTransferEngine | None = None

    def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> Contribution:
        started = time.perf_counter()
        failure = self._prepare(version)
        if failure:  # on every rank: none of them has started
            return Contribution(failure if self._rank == 0 else None)
        assert self._engine is not None
        self._source.begin(parameters)
        try:
            with bounded(self._patience_s, f"sending policy version {version}", self._relay):
                self._engine.send_weights()
            failure = self._relay.failure
        except Exception as error:  # any exception: the other ranks wait for this one's outcome
            failure = f"{type(error).__name__}: {error}"
        self._source.drain()
        sent = self._source.tensors if self._rank == 0 else ()
        nbytes = sum(tensor.nbytes for tensor in sent)
        elapsed = time.perf_counter() - started
        return Contribution.of(
            self._source.shards, elapsed, failure, nbytes=nbytes, tensors=len(sent)
        )

    def load(self, version: int) -> None:
        self._relay.client.update_weights(
            Seal(version, wire.read_checksums(self._source.sums)).message()
        )
        self._relay.client.finish_weight_update(str(version))

    def forget(self, version: int) -> None:
        self._relay.abandon(f"policy version {version} was not sent by every rank")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _prepare(self, version: int) -> str | None:
        """Start the update, connect to the engines (once), and send the announcement; return the
        failure, on every rank.
        """
        format = self._source.shards.format.value
        announced = Announcement(version, format, self._source.tensors)
        failure = self._refusal(self._relay.begin)
        if failure is None and self._engine is None:  # lost engines would have refused
            failure = self._open_engine()
        return failure or self._refusal(
            lambda: self._relay.client.update_weights(announced.message())
        )

    def _refusal(self, ask: Callable[[], None]) -> str | None:
        """Return the sampler's refusal of rank 0's request, on every rank."""
        failure = None
        if self._rank == 0:
            try:
                ask()
            except Exception as error:  # any exception: the other ranks wait for the outcome
                failure = str(error)
        return exchange(failure)[0]

    def _open_engine(self) -> str | None:
        """Run vLLM's rendezvous: collective over the ranks of its trainer engine, and the sampler's
        workers.
        """
        failure = None
        try:
            # only rank 0 opens the group
            place = meeting_place(self._addresses) if self._rank == 0 else ("", 0)
            largest = max(tensor.nbytes for tensor in self._source.tensors)
            info = init_info(self._sync.transport, self._workers, self._rank, place, largest)
            with bounded(self._patience_s, "the rendezvous of learner and engines", self._relay):
                self._engine = WeightTransferTrainerFactory.trainer_init(
                    info, client=self._relay, source=UnshardedTensors(self._source)
                )
        except Exception as error:  # any exception, as above
            failure = f"sync.transport={self._sync.transport}: {type(error).__name__}: {error}"
        failure = next((each for each in exchange(failure) if each), None)
        if failure:
            self.close()
        return failure


@contextmanager
def bounded(seconds: float, what: str, relay: "Relay") -> Iterator[None]:
    """End this process after a timeout: a collective whose peer has died waits on the device,
    uninterruptibly.
    """

    def give_up() -> None:
        why = f": {relay.failure}" if relay.failure else ""
        print(
            f"{what} did not end within sampler.request_timeout_s={seconds:g}{why}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class UnshardedTensors(WeightSource):
    """`UnshardedSource` with the interface that vLLM's trainer engines expect."""

    def __init__(self, source: UnshardedSource) -> None:
        self._source = source

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(each.name, torch_dtype(each.dtype), each.shape)
            for each in self._source.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._source)


class Relay:
    """Client of vLLM's trainer engine: rank 0's connection to the sampler."""

    def __init__(self, sampler: SamplerClient | None) -> None:
        self._sampler = sampler
        self.failure: str | None = None  # why the sampler refused while vLLM was sending

    def begin(self) -> None:
        self.failure = None
        self.client.start_weight_update()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self.client.init_weight_transfer_engine(init_info)
        except Exception as error:  # rank 0 waits in the rendezvous
            self.failure = str(error)
            raise

    def start_weight_update(self) -> None:
        """Do nothing: vLLM's engine calls this; `begin` has already started the update."""

    def update_weights(self, update_info: Any) -> None:
        """Send tensors, keeping a refusal for later: raised here, it would leave other ranks in
        vLLM's collectives.
        """
        if self.failure is not None:
            return
        message = {name: value for name, value in update_info.items() if value is not None}
        if "ipc_handles" in message:
            message["ipc_handles"] = wire.encode_handles(message["ipc_handles"])
        try:
            self.client.update_weights(message)
        except Exception as error:  # any exception, see above
            self.failure = str(error)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: vLLM's engine calls this after its sends; VllmPush finishes once every rank
        has.
        """

    def abandon(self, reason: str) -> None:
        """Have the engine drop its part of the update; it replies with the reason."""
        # second case: it had already dropped the update
        with suppress(WeightSyncError, RuntimeError):
            self.client.update_weights({wire.ABANDON: reason})

    @property
    def client(self) -> SamplerClient:
        assert self._sampler is not None, "only rank 0 has a connection to the sampler"
        return self._sampler


def init_info(
    transport: Transport, workers: int, rank: int, place: tuple[str, int], largest: int
) -> TrainerInitInfo:
    """Return vLLM's settings of a transport; the workers get theirs from rank 0. `largest`: bytes
    of a tensor.
    """
    buffer = buckets.BUCKET_BYTES
    if transport == Transport.ipc:  # its buffer does not grow: vLLM refuses larger tensors
        return IPCTrainerInitInfo(
            rank=rank, packed=True, packed_buffer_size_bytes=max(buffer, largest)
        )
    return NCCLTrainerInitInfo(*place, 1 + workers, rank=rank, packed_buffer_size_bytes=buffer)


def meeting_place(addresses: Sequence[str]) -> tuple[str, int]:
    """Return the address at which all engines reach rank 0, as the first remote server sees it, and
    a free port.
    """
    host = LOOPBACK
    far = next((urlsplit(one) for one in addresses if not is_loopback(one)), None)
    if far is not None:
        # vLLM's rendezvous supports IPv4 only
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((far.hostname, far.port))  # nothing is sent
            host = probe.getsockname()[0]
    return host, free_port(host)
