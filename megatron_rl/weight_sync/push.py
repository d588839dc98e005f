"""One weight sync, from the learner's shards to a sampler that serves the new version.

Every rank of the learner calls `push`; rank 0 also drives the sampler. Whatever goes wrong on any rank, or in the
sampler, is raised on all of them, and the sampler keeps serving the version before.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_rl.exchange import exchange
from megatron_rl.sampler.fleet_config import distinct_formats, is_fleet
from megatron_rl.schema import Config, Format, Transport
from megatron_rl.weight_sync.file_transport import Written, remove_version, update_info, write_version
from megatron_rl.weight_sync.formats import BY_FORMAT
from megatron_rl.weight_sync.groups import Ranks
from megatron_rl.weight_sync.hf_folder import read_config
from megatron_rl.weight_sync.layout import Layout
from megatron_rl.weight_sync.manifest import WeightSyncError
from megatron_rl.weight_sync.model_shape import ModelShape
from megatron_rl.weight_sync.quantization_error import ErrorSummary, summarize
from megatron_rl.weight_sync.smoothing import Smoothing
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.sync_dir import SyncDir

WRITE_AHEAD = 16  # tensors between gathering and writing
WRITER_POLL_S = 0.5


class LearnerWeights(Protocol):
    """What a sync asks of the learner."""

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's shards by global megatron name (see mapping.global_name)."""

    def take_activation_amax(self) -> torch.Tensor:
        """What this rank saw since the last call, [layer, norm, channel]: asked for with quantization.smoothing."""


class SamplerClient(Protocol):
    """The four methods of vLLM's own weight-sync client."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass(frozen=True)
class SyncSeconds:
    """Where a sync's time goes. The first four are the slowest writer's; the sampler is blocked during `load`."""

    plan: float = 0.0
    quantize: float = 0.0
    gather: float = 0.0
    transfer: float = 0.0  # writing, as far as it does not hide behind the two before
    load: float = 0.0  # verifying and loading in the sampler, as the driver waits for it
    total: float = 0.0


@dataclass(frozen=True)
class SyncReport:
    version: int
    nbytes: int
    tensors: int
    seconds: SyncSeconds
    error: ErrorSummary

    def metrics(self) -> dict[str, float]:
        out = {f"sync/{name}_s": value for name, value in vars(self.seconds).items()}
        out |= {
            "sync/version": float(self.version),
            "sync/bytes": float(self.nbytes),
            "sync/tensors": float(self.tensors),
        }
        if self.error.worst:
            out |= {
                "sync/quant_error_max": self.error.worst[0][1],
                "sync/quant_error_mean": self.error.mean,
                "sync/clamped_fraction": self.error.clamped_fraction,
            }
        return out


@dataclass(frozen=True)
class _Contribution:
    """What one rank tells all others after its part."""

    failure: str | None = None
    nbytes: int = 0
    tensors: int = 0
    seconds: SyncSeconds = field(default_factory=SyncSeconds)
    error: ErrorSummary = field(default_factory=ErrorSummary)

    @classmethod
    def sum(cls, parts: Sequence[_Contribution]) -> _Contribution:
        """One rank's parts of a version in several formats."""
        names = ("quantize", "gather", "transfer")
        return cls(
            next((part.failure for part in parts if part.failure), None),
            sum(part.nbytes for part in parts),
            sum(part.tensors for part in parts),
            SyncSeconds(**{name: sum(getattr(part.seconds, name) for part in parts) for name in names}),
            ErrorSummary.merge(part.error for part in parts),
        )

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, sent: dict[str, Any]) -> _Contribution:
        error = dict(sent["error"])
        error["worst"] = tuple((name, value) for name, value in error["worst"])
        return cls(**{**sent, "seconds": SyncSeconds(**sent["seconds"]), "error": ErrorSummary(**error)})


class WeightSync:
    """Made on every rank. `sampler` is rank 0's; None elsewhere, or where only the writing is wanted."""

    def __init__(
        self,
        learner: LearnerWeights,
        sampler: SamplerClient | None,
        config: Config,
        hf_config: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        if config.sync.transport is not Transport.file:
            raise WeightSyncError(f"sync.transport={config.sync.transport.value} is not available here; take `file`")
        started = time.perf_counter()
        shape = ModelShape.from_hf(hf_config or read_config(Path(config.model.path)))
        ranks = ranks or Ranks.from_megatron()
        quantization = config.quantization
        smoothing = None
        if quantization.smoothing:
            every = quantization.smoothing_every
            smoothing = Smoothing(shape, quantization.smoothing, every, ranks.world, learner.take_activation_amax)
        self._learner, self._sampler, self._config = learner, sampler, config
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        layout = Layout.from_config(config.learner)
        self._sources = {  # one for each weight format among the engines
            format: ShardSource(
                shape,
                layout,
                ranks,
                format,
                quantization.ignore,
                bucket_bytes=config.sync.bucket_mib << 20,
                smoothing=smoothing if format == Format.int8 else None,
            )
            for format in distinct_formats(config)
        }
        self._served: int | None = None  # the version that restarted engines will ask for
        self._sync_dir: SyncDir | None = None
        self._writer, self._writers, self._nbytes = self._writer_number()
        self._directory = self._open_directory()
        self._engine_ready = False
        self._plan_seconds = time.perf_counter() - started

    @property
    def directory(self) -> Path:
        return self._directory

    def push(self, version: int) -> SyncReport:
        """Send the learner's present weights as policy `version`; returns once the sampler serves them."""
        started = time.perf_counter()
        plan_seconds, self._plan_seconds = self._plan_seconds, 0.0
        mine = self._write(version)
        parts = [_Contribution.decode(part) for part in exchange(mine.encode())]
        failures = [f"rank {rank}: {part.failure}" for rank, part in enumerate(parts) if part.failure]
        if failures:
            if self._rank == 0:
                self._remove(version)
            raise WeightSyncError(f"policy version {version} was not sent: " + "; ".join(failures[:3]))
        load_seconds, outcome = 0.0, None
        if self._rank == 0:
            load_seconds, outcome = self._load(version)
        load_seconds, message = exchange([load_seconds, None if outcome is None else str(outcome)])[0]
        self._tidy(version, taken=message is None)
        if outcome is not None:
            raise outcome
        if message is not None:
            raise WeightSyncError(f"the sampler did not take policy version {version}: {message}")
        slowest = {
            name: max(getattr(part.seconds, name) for part in parts) for name in ("quantize", "gather", "transfer")
        }
        seconds = SyncSeconds(plan=plan_seconds, load=load_seconds, total=time.perf_counter() - started, **slowest)
        return SyncReport(
            version,
            sum(part.nbytes for part in parts),
            sum(part.tensors for part in parts),
            seconds,
            ErrorSummary.merge(part.error for part in parts),
        )

    def close(self) -> None:
        if self._sync_dir is not None:
            self._sync_dir.close()
            self._sync_dir = None

    def _writer_number(self) -> tuple[int, int, int]:
        """(this rank's number among the writers, how many there are, bytes of all of them)."""
        writes = exchange([self._writes, sum(source.nbytes for source in self._sources.values())])
        return sum(w for w, _ in writes[: self._rank]), sum(w for w, _ in writes), sum(n for _, n in writes)

    def _open_directory(self) -> Path:
        failure: str | None = None
        if self._rank == 0:
            try:
                self._sync_dir = SyncDir(self._config.sync.dir)
                self._sync_dir.require_free(self._nbytes)
            except WeightSyncError as error:
                failure = str(error)
                self.close()
        path, failure = exchange([str(self._sync_dir.path) if self._sync_dir else "", failure])[0]
        if failure is None and self._writes and not Path(path).is_dir():
            failure = f"{path} of rank 0 is not visible on every host: set sync.dir to a shared file system"
        reasons = [reason for reason in exchange(failure) if reason]
        if reasons:
            self.close()
            raise WeightSyncError(reasons[0])
        return Path(path)

    @property
    def _writes(self) -> bool:
        return any(source.writes for source in self._sources.values())

    def _folder(self, format: Format) -> Path:
        return self._directory / format.value if len(self._sources) > 1 else self._directory

    def _update_info(self, version: int) -> dict[str, Any]:
        """What the sampler needs to find the version; by format where its engines differ."""
        infos = {one.value: update_info(self._folder(one), version, self._writers) for one in self._sources}
        return {BY_FORMAT: infos} if len(infos) > 1 else next(iter(infos.values()))

    def _remove(self, version: int) -> None:
        for format in self._sources:
            remove_version(self._folder(format), version)

    def _tidy(self, version: int, taken: bool) -> None:
        """Versions that nobody needs. A fleet's servers may start again and ask for the last one that was taken."""
        if self._sampler is None:  # the written version is the result
            return
        if not (taken and is_fleet(self._config)):
            self._remove(version)
            return
        if self._served is not None:
            self._remove(self._served)
        self._served = version

    def _write(self, version: int) -> _Contribution:
        return _Contribution.sum([self._write_format(version, format) for format in self._sources])

    def _write_format(self, version: int, format: Format) -> _Contribution:
        started = time.perf_counter()
        source = self._sources[format]
        tensors = source.tensors(dict(self._learner.named_parameters()))
        failure, count, nbytes = None, 0, 0
        try:
            if self._sync_dir is not None:
                self._sync_dir.require_free(self._nbytes)
            if source.writes:
                written = self._write_alongside(version, format, tensors)
                count, nbytes = written.tensors, written.nbytes
        except (WeightSyncError, OSError) as error:
            failure = str(error)
        for _ in tensors:  # the other ranks of the group are still in the middle of it
            pass
        elapsed = time.perf_counter() - started
        seconds = SyncSeconds(
            quantize=source.seconds.quantize,
            gather=source.seconds.gather,
            transfer=max(0.0, elapsed - source.seconds.quantize - source.seconds.gather) if source.writes else 0.0,
        )
        return _Contribution(source.failure or failure, nbytes, count, seconds, summarize(source.errors))

    def _write_alongside(self, version: int, format: Format, tensors: Iterator[tuple[str, torch.Tensor]]) -> Written:
        """Write in a thread of its own, while this one quantizes and gathers the next tensors."""
        handover: queue.Queue[tuple[str, torch.Tensor] | None] = queue.Queue(maxsize=WRITE_AHEAD)
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync-writer") as pool:
            writing = pool.submit(
                write_version,
                self._folder(format),
                version,
                iter(handover.get, None),
                format=format.value,
                writer=self._writer,
                writers=self._writers,
                bucket_bytes=self._config.sync.bucket_mib << 20,
            )
            try:
                for pair in tensors:
                    while not writing.done():  # done before the end: it failed
                        try:
                            handover.put(pair, timeout=WRITER_POLL_S)
                            break
                        except queue.Full:
                            continue
            finally:
                while not writing.done():
                    try:
                        handover.put(None, timeout=WRITER_POLL_S)
                        break
                    except queue.Full:
                        continue
            return writing.result()

    def _load(self, version: int) -> tuple[float, Exception | None]:
        """Rank 0: have the sampler verify and load what was written."""
        if self._sampler is None:
            return 0.0, None
        started = time.perf_counter()
        try:
            if not self._engine_ready:
                self._sampler.init_weight_transfer_engine({})
                self._engine_ready = True
            self._sampler.start_weight_update()
            self._sampler.update_weights(self._update_info(version))
            self._sampler.finish_weight_update(str(version))
        except Exception as error:  # every kind: the other ranks wait for the outcome
            return time.perf_counter() - started, error
        return time.perf_counter() - started, None
