"""Weight sync, called on every rank: sends the learner's shards by a transport until the sampler
serves the version.

Every rank of the learner calls `push`; rank 0 also drives the sampler. An error on any rank, or in
the sampler, is raised on all of them, and the sampler keeps serving the previous version.
"""

import time
from collections.abc import Mapping
from dataclasses import asdict, replace

import msgspec
from torch import Tensor

from megatron_rl.config.fleet import distinct_formats
from megatron_rl.config.schema import Config, Format, KvCache, Transport
from megatron_rl.distributed import exchange
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.smoothing import SCALES_STAY, Smoothing
from megatron_rl.weight_sync import buckets
from megatron_rl.weight_sync.file_push import FilePush
from megatron_rl.weight_sync.manifest import UpdateRefused, WeightSyncError
from megatron_rl.weight_sync.source import ShardSource
from megatron_rl.weight_sync.transports import (
    Contribution,
    LearnerWeights,
    Push,
    SamplerClient,
    SyncReport,
    this_rank,
)


class WeightSync:
    """Sender of policies to a sampler; created on every rank. `sampler`: on rank 0 only; None to
    write the version only.
    """

    def __init__(
        self,
        learner: LearnerWeights,
        sampler: SamplerClient | None,
        config: Config,
    ) -> None:
        started = time.perf_counter()
        quantization = config.quantization
        shape = learner.model.shape
        world = learner.groups.world
        self.smoothing: Smoothing | None = None
        if quantization.smoothing:
            self.smoothing = Smoothing(
                shape, quantization.smoothing, SCALES_STAY, world, learner.take_activation_amax
            )
        cache_scales = None
        if quantization.kv_cache == KvCache.fp8:
            cache_scales = CacheScales(shape.layers, world, learner.take_cache_amax)
        sources = {
            format: ShardSource(
                learner.model,
                learner.groups,
                format,
                quantization.ignore,
                bucket_bytes=buckets.BUCKET_BYTES,
                smoothing=self.smoothing if format == Format.int8 else None,
                cache_scales=cache_scales,
            )
            for format in distinct_formats(config.sampler, quantization)
        }
        self._learner = learner
        self._scales: tuple[Smoothing | CacheScales, ...] = tuple(
            filter(None, (self.smoothing, cache_scales))
        )
        self._rank = this_rank()
        self.transport = _transport(sources, sampler, config)
        # the last version failed in a way that a retry may fix
        self._again = False
        self._plan_seconds = time.perf_counter() - started

    def push(self, version: int) -> SyncReport:
        """Send the learner's current weights as policy `version`; return once the sampler serves
        them.

        After a refusal by the sampler, or a file system error other than lack of space, the full
        version is sent once more: a bit flip in transfer is not repeated.
        """
        try:
            return self._push(version)
        except Exception as error:  # patches must not build on a version that did not arrive
            self.transport.start_over()
            if not self._again:
                raise
            first = str(error)
        try:
            return replace(self._push(version), first_failure=first)
        except WeightSyncError as error:
            self.transport.start_over()
            raise type(error)(f"{error} (sent twice; the first time: {first})") from error

    def _push(self, version: int) -> SyncReport:
        self._again = False
        started = time.perf_counter()
        plan_seconds = self._plan_seconds
        self._plan_seconds = 0.0
        try:
            mine = self.transport.send(version, dict(self._learner.named_parameters()))
            parts = msgspec.convert(exchange(asdict(mine)), list[Contribution])
        except WeightSyncError:
            raise
        except RuntimeError as error:  # a collective's error has its backend's message
            raise WeightSyncError(
                f"policy version {version} was not sent: another rank of the learner ended or lost "
                f"its connection in the middle of it ({error}). The sampler serves the version "
                "before; see that rank's log"
            ) from error
        whole = Contribution.merge(parts, max)  # the slowest rank's seconds
        failures = [
            f"rank {rank}: {part.failure}" for rank, part in enumerate(parts) if part.failure
        ]
        if failures:
            self._again = whole.passing
            if self._rank == 0:
                self.transport.forget(version)
            raise WeightSyncError(
                f"policy version {version} was not sent: " + "; ".join(failures[:3])
            )
        load_seconds = self._load(version)
        seconds = replace(
            whole.seconds, plan=plan_seconds, load=load_seconds, total=time.perf_counter() - started
        )
        changed = whole.changed / whole.values if whole.values else None
        return SyncReport(version, whole.nbytes, whole.tensors, seconds, whole.error, changed)

    def state(self) -> dict[str, Tensor]:
        """Return the scales that the next sync builds on, equal on every rank, for a checkpoint."""
        return {name: value for scales in self._scales for name, value in scales.state().items()}

    def restore(self, state: Mapping[str, Tensor], repeats: bool) -> None:
        for scales in self._scales:
            scales.restore(state, repeats)

    def close(self) -> None:
        self.transport.close()

    def _load(self, version: int) -> float:
        """Have the sampler load the version; every rank raises its refusal. Return the seconds that
        rank 0 waited.
        """
        started = time.perf_counter()
        waited = 0.0
        outcome = None
        if self._rank == 0:
            try:
                self.transport.load(version)
            except Exception as error:  # any exception: the other ranks wait for the outcome
                outcome = error
            waited = time.perf_counter() - started
            # before another rank writes anything
            self.transport.tidy(version, taken=outcome is None)
        refused = isinstance(outcome, WeightSyncError)
        waited, message, self._again = exchange(
            [waited, None if outcome is None else str(outcome), refused]
        )[0]
        if self._again:
            raise UpdateRefused(
                message if self._rank == 0 else _not_taken(version, message)
            ) from outcome
        if outcome is not None:
            raise outcome
        if message is not None:
            raise WeightSyncError(_not_taken(version, message))
        return waited


def _not_taken(version: int, why: str) -> str:
    return f"the sampler did not take policy version {version}: {why}"


def _transport(
    sources: dict[Format, ShardSource], sampler: SamplerClient | None, config: Config
) -> Push:
    if config.sync.transport == Transport.file:
        return FilePush(sources, sampler, config.sync, config.sampler.tensor_parallel)
    # vLLM's trainer side is the only part of vLLM that learner ranks import, and only for its
    # transports
    from megatron_rl.weight_sync.vllm_push import VllmPush

    # mixed formats use files, as validated in the config
    (source,) = sources.values()
    return VllmPush(source, sampler, config.sync, config.sampler)
