"""Sender of the `file` transport on learner ranks: a thread writes a version; rank 0 has it loaded
and removes old ones.
"""

import errno
import queue
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config.schema import Format, SyncSection
from megatron_rl.distributed import exchange
from megatron_rl.quantization.formats import BY_FORMAT
from megatron_rl.weight_sync import buckets
from megatron_rl.weight_sync.buckets import NamedTensors
from megatron_rl.weight_sync.delta import Lineage, Sent
from megatron_rl.weight_sync.file_transport import (
    SyncDir,
    remove_version,
    update_info,
    write_over,
    write_version,
)
from megatron_rl.weight_sync.manifest import Manifest, WeightSyncError
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import Contribution, Push, SamplerClient, this_rank

WRITE_AHEAD = 16  # tensors queued between gathering and writing
WRITER_POLL_S = 0.5
FULL = (errno.ENOSPC, errno.EDQUOT)

Item = tuple[str, Tensor] | BaseException | None  # None: the end


class FilePush(Push):
    """Sender of the `file` transport; without a sampler the written version is the result."""

    def __init__(
        self,
        sources: dict[Format, ShardSource],
        sampler: SamplerClient | None,
        sync: SyncSection,
        ranks: int = 1,
    ) -> None:
        """`ranks`: of an engine, which share each tensor."""
        self._cuts = {format: source.cuts(ranks) for format, source in sources.items()}
        self._sources = sources
        self._sampler = sampler
        self._sync = sync
        self._rank = this_rank()
        # rank 0: versions that engines may still read, or that patches build on
        self._kept: list[int] = []
        self._lineage = Lineage(sync.full_every)
        if sync.full_every > 1:
            self._sent = {format: Sent() for format in sources}
        else:
            self._sent = {}
        self._sync_dir: SyncDir | None = None
        each_rank = exchange([self._writes, *(source.nbytes for source in sources.values())])
        writes, *nbytes = zip(*each_rank, strict=True)
        self._writer = sum(writes[: self._rank])
        self._writers = sum(writes)
        self._nbytes = dict(zip(sources, map(sum, nbytes), strict=True))  # of all writers
        self.directory = self._open_directory()
        self._engine_ready = False

    def send(self, version: int, parameters: Mapping[str, Tensor]) -> Contribution:
        contribution = Contribution.merge(
            [self._write(version, format, parameters) for format in self._sources], sum
        )
        self._lineage.add(version)
        return contribution

    def load(self, version: int) -> None:
        if self._sampler is None:
            return
        if not self._engine_ready:
            self._sampler.init_weight_transfer_engine({})
            self._engine_ready = True
        self._sampler.start_weight_update()
        self._sampler.update_weights(self._update_info(version))
        self._sampler.finish_weight_update(str(version))

    def start_over(self) -> None:
        self._lineage.versions.clear()
        for sent in self._sent.values():
            sent.forget()

    def forget(self, version: int) -> None:
        for format in self._sources:
            remove_version(self._folder(format), version)

    def tidy(self, version: int, taken: bool) -> None:
        """Remove old versions, but keep the last accepted one and those it builds on: a restarted
        engine may read them.
        """
        if self._sampler is None:
            return
        if not taken:
            self.forget(version)
            return
        self._kept.append(version)
        needed = self._lineage.versions
        for old in [old for old in self._kept if old not in needed]:
            self._kept.remove(old)
            self.forget(old)
        # on a shared file system another machine may have cached pages of the old content, and a
        # starting server may still be reading it
        if self._sync.dir is None and self._lineage.base is None:
            for format in self._sources:
                write_over(self._folder(format), needed[0])

    def close(self) -> None:
        if self._sync_dir is not None:
            self._sync_dir.close()
            self._sync_dir = None

    def _open_directory(self) -> Path:
        failure: str | None = None
        if self._rank == 0:
            try:
                self._sync_dir = SyncDir(self._sync.dir)
                self._sync_dir.require_free(sum(self._nbytes.values()))
            except WeightSyncError as error:
                failure = str(error)
                self.close()
        path = ""
        if self._sync_dir is not None:
            path = str(self._sync_dir.path)
        path, failure = exchange([path, failure])[0]
        if failure is None and self._writes and not Path(path).is_dir():
            failure = f"{path} of rank 0 is not visible on every node: set sync.dir to a shared file system"
        reasons = [reason for reason in exchange(failure) if reason]
        if reasons:
            self.close()
            raise WeightSyncError(reasons[0])
        return Path(path)

    @property
    def _writes(self) -> bool:
        return any(source.writes for source in self._sources.values())

    def _folder(self, format: Format) -> Path:
        if len(self._sources) > 1:
            return self.directory / format.value
        return self.directory

    def _update_info(self, version: int) -> dict[str, Any]:
        """Return the argument of `update_weights`: the version's location, by format if engines
        differ.
        """
        infos = {
            one.value: update_info(self._folder(one), version, self._writers, background=True)
            for one in self._sources
        }
        if len(infos) > 1:
            return {BY_FORMAT: infos}
        return next(iter(infos.values()))

    def _write(
        self, version: int, format: Format, parameters: Mapping[str, Tensor]
    ) -> Contribution:
        started = time.perf_counter()
        source = self._sources[format]
        tensors = source.tensors(parameters)
        failure = None
        passing = False
        count = 0
        nbytes = 0
        try:
            if self._sync_dir is not None:
                self._sync_dir.require_free(self._nbytes[format])
            if source.writes:
                written = self._write_alongside(version, format, tensors)
                count = len(written.tensors)
                nbytes = written.nbytes
        except (WeightSyncError, OSError) as error:
            failure = str(error)
            cause = error.__cause__ or error
            passing = isinstance(cause, OSError) and cause.errno not in FULL
        for _ in tensors:  # the other ranks of the group are still in its collectives
            pass
        elapsed = time.perf_counter() - started if source.writes else 0.0
        sent = self._sent.get(format, Sent())
        counts = {
            "nbytes": nbytes,
            "tensors": count,
            "values": sent.values,
            "changed": sent.changed,
        }
        return Contribution.of(source, elapsed, failure, passing, **counts)

    def _write_alongside(self, version: int, format: Format, tensors: NamedTensors) -> Manifest:
        """Write in a thread, while this one quantizes and gathers the next tensors."""
        handover: queue.Queue[Item] = queue.Queue(maxsize=WRITE_AHEAD)
        last: BaseException | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync-writer") as pool:
            writing = pool.submit(
                write_version,
                self._folder(format),
                version,
                _handed_over(handover),
                format=format.value,
                writer=self._writer,
                bucket_bytes=buckets.BUCKET_BYTES,
                sent=self._sent.get(format),
                base=self._lineage.base,
                cuts=self._cuts[format],
            )
            try:
                for pair in tensors:
                    _hand_over(pair, handover, writing)
            # the writer must not mistake the tensors so far for a complete version
            except BaseException as error:
                last = error
                raise
            finally:
                _hand_over(last, handover, writing)
            return writing.result()


def _hand_over(item: Item, handover: queue.Queue[Item], writing: Future[Manifest]) -> None:
    """Wait for room in the queue while the writer works: if it ends early, it has failed."""
    while not writing.done():
        try:
            return handover.put(item, timeout=WRITER_POLL_S)
        except queue.Full:
            continue


def _handed_over(handover: queue.Queue[Item]) -> NamedTensors:
    while (item := handover.get()) is not None:
        if isinstance(item, BaseException):
            raise item
        yield item
