"""A learner rank's part of a sync or export: merges LoRA adapters into its shards, smooths,
quantizes, gathers over its tensor-parallel group, yields full tensors; scales of an FP8 cache.

Every rank of the learner iterates in lockstep; only writer ranks (the first of each tensor-parallel
group of the first replica) get tensors out of it. Quantization happens before the gather, so
quantized bytes are sent; row-parallel weights first take the maximum of their row amax over the
group, which makes the result bit-equal to quantizing the full tensor. A bucket costs at most two
collectives, for any number of tensors.

An error on one rank does not break the lockstep: the rank continues with empty content and keeps
the reason in `failure`, which the caller exchanges over all ranks.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_rl.config.schema import Format
from megatron_rl.models.layout import Place
from megatron_rl.models.mapping import Param, adapted_rows, adapters, find
from megatron_rl.models.model import Model
from megatron_rl.models.shards import ShardGroups, cut, merge, row_numbers
from megatron_rl.models.table import Norm, Split
from megatron_rl.models.tensors import TensorSpec, dtype_name
from megatron_rl.quantization.cache_scales import CacheScales
from megatron_rl.quantization.quantize import quantize, row_amax, sample_error
from megatron_rl.quantization.smoothing import Smoothing
from megatron_rl.weight_sync import engine_shards
from megatron_rl.weight_sync.buckets import (
    BUCKET_BYTES,
    Bucket,
    BucketEntry,
    NamedTensors,
    Workspace,
    full_tensors,
    gather,
    make_buckets,
)
from megatron_rl.weight_sync.engine_shards import ShardLayout

Parameters = Mapping[str, Tensor]
SCALES_KEY = (0, 2, 0, 0)  # after the buckets of that rank
DIVERGED = "the weight holds NaN or infinity: the learner has diverged"
PLAIN = torch.bfloat16  # dtype of the sampler's unquantized tensors


@dataclass
class SyncSeconds:
    """Seconds of a sync by part; quantize, gather, transfer are the slowest rank's. The driver
    waits for `load`.
    """

    plan: float = 0.0  # of this rank
    quantize: float = 0.0
    gather: float = 0.0
    transfer: float = 0.0  # writing, as far as it is not overlapped with the two before
    load: float = 0.0  # verifying, building and swapping in the sampler
    total: float = 0.0


class ShardSource:
    def __init__(
        self,
        model: Model,
        groups: ShardGroups,
        format: Format = Format.none,
        ignore: Sequence[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
        smoothing: Smoothing | None = None,
        cache_scales: CacheScales | None = None,
    ) -> None:
        self.failure: str | None = None
        self.errors: list[Tensor] = []  # of `sample_error`
        self.seconds = SyncSeconds()
        self.format = format
        self._model = model
        self._place = groups.place
        self._workspace = Workspace()
        self._smoothing = smoothing
        self._cache_scales = cache_scales
        self._buckets = make_buckets(model, groups, format, ignore, dtype_name(PLAIN), bucket_bytes)

    @property
    def writes(self) -> bool:
        """True if this rank gets tensors out of `tensors`."""
        return any(bucket.rank == 0 for bucket in self._buckets)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors this rank yields."""
        return sum(tensor.nbytes for tensors in self.bucket_tensors for tensor in tensors or ())

    def tensors(self, parameters: Parameters) -> NamedTensors:
        """Yield (Hugging Face name, full tensor) of everything this rank writes; nothing on other
        ranks.

        `parameters`: this rank's shards by global megatron name. Iterate to the end on every rank.
        """
        for bucket in self.buckets(parameters):
            yield from bucket

    def buckets(self, parameters: Parameters) -> Iterator[NamedTensors]:
        """Yield the same tensors bucket by bucket. Exhaust each before requesting the next.

        Collectives of all ranks of the learner run at the call, not at the first bucket: some ranks
        have none.
        """
        shards = self._begin(parameters)
        passes = [self._run(bucket, shards) for bucket in self._buckets]
        if self._writes_scales:
            passes.append(self._scale_values(_device(shards)))
        return iter(passes)

    def _scale_values(self, device: torch.device) -> NamedTensors:
        """Return the scales' values; zeros if this rank has failed: the version is dropped, but the
        lockstep continues.
        """
        if self._cache_scales is not None and self.failure is None:
            # those of a checkpoint are on the CPU
            yield from ((name, scale.to(device)) for name, scale in self._cache_scales.values())
        else:
            yield from (
                (scale.name, torch.zeros(scale.shape, device=device))
                for scale in self._scale_tensors
            )

    def _begin(self, parameters: Parameters) -> dict[str, Tensor]:
        self.failure = None
        self.seconds = SyncSeconds()
        self.errors = []
        shards = self._by_table_name(parameters)
        if self._smoothing is not None:
            self._smoothing.begin_sync(lambda: self._column_amax(shards))
        if self._cache_scales is not None:
            try:
                self._cache_scales.begin_sync()
            except ValueError as error:
                self._fail(str(error))
        return shards

    @property
    def bucket_keys(self) -> list[tuple[int, ...]]:
        """Return the key of each bucket: (stage, experts or not, expert rank, number), equal on all
        ranks that share it.
        """
        keys: list[tuple[int, ...]] = []
        for bucket in self._buckets:
            expert = bucket.jobs[0].param.row.expert
            owner = (self._place.pp, int(expert), self._place.ep if expert else 0)
            keys.append((*owner, sum(key[:3] == owner for key in keys)))
        if self._writes_scales:
            return [*keys, SCALES_KEY]
        return keys

    @property
    def bucket_tensors(self) -> list[tuple[TensorSpec, ...] | None]:
        """Return the tensors of each bucket that this rank yields, None if another rank of the
        group does.
        """
        weights = [
            tuple(out.tensor for job in bucket.jobs for out in job.flat(0))
            if bucket.rank == 0
            else None
            for bucket in self._buckets
        ]
        if self._writes_scales:
            return [*weights, self._scale_tensors]
        return weights

    def cuts(self, ranks: int) -> dict[str, ShardLayout]:
        """Return the layouts of this rank's tensors that are partitioned for an engine of so many
        ranks; others are sent in full.
        """
        return {
            out.tensor.name: ShardLayout.of(
                out.tensor, out.dim, job.param.kinds(self._model.shape, stored), vocabulary, ranks
            )
            for bucket in self._buckets
            for job in (bucket.jobs if bucket.rank == 0 and ranks > 1 else ())
            for vocabulary in [job.param.row.split is Split.vocab]
            for stored, outs in enumerate(job.outputs[0])
            for out in outs
            if out.dim is not None and out.tensor.nbytes >= engine_shards.SMALL
        }

    @property
    def _writes_scales(self) -> bool:
        # written by the first rank, as they belong to no rank
        return self._cache_scales is not None and self._place == Place()

    @property
    def _scale_tensors(self) -> tuple[TensorSpec, ...]:
        if self._cache_scales is None:
            return ()
        return self._cache_scales.tensors

    def _by_table_name(self, parameters: Parameters) -> dict[str, Tensor]:
        shards: dict[str, Tensor] = {}
        for name, tensor in parameters.items():
            try:
                param = find(name, self._model.shape)
            except KeyError as error:
                self._fail(str(error.args[0]))
                continue
            shards[param.megatron] = tensor.detach()
        own = [job.param for bucket in self._buckets for job in bucket.jobs]
        wanted_names = [
            one.megatron for param in own for one in (param, *adapters(param, self._model.shape))
        ]
        missing = [name for name in wanted_names if name not in shards]
        if missing:
            self._fail(
                f"the learner did not provide {missing[0]} ({len(missing)} parameters missing)"
            )
        return shards

    @torch.no_grad()
    def _run(self, bucket: Bucket, shards: Parameters) -> NamedTensors:
        started = time.perf_counter()
        parts = [self._parts(job, shards) for job in bucket.jobs]
        amax = self._shared_amax(bucket, parts, _device(shards))
        content = [
            self._convert(job, part, bucket.rank, amax)
            for job, part in zip(bucket.jobs, parts, strict=True)
        ]
        del parts, amax  # copies, if anything is folded or merged into the weights
        converted = time.perf_counter()
        received = gather(bucket, content, self._workspace, _device(shards))
        self.seconds.quantize += converted - started
        self.seconds.gather += time.perf_counter() - converted
        whole = [made for made in content if made is not None]
        if bucket.rank == 0 and len(whole) == len(content):
            yield from full_tensors(bucket, whole, received)

    def _parts(self, job: BucketEntry, shards: Parameters) -> list[Tensor] | None:
        local = self._merged(job.param, shards)
        if local is None:
            return None
        if self._smoothing is not None:
            local = self._smoothing.fold(job.param, local)
        return [part for _, part in cut(job.param, local, job.slices)]

    def _merged(self, param: Param, shards: Parameters) -> Tensor | None:
        """Return this rank's shard for the sampler, merged with its LoRA adapter if it has one."""
        model = self._model
        local = shards.get(param.megatron)
        pair = [shards.get(one.megatron) for one in adapters(param, model.shape)]
        if local is None or not pair:
            return local
        a, b = pair
        if a is None or b is None:
            return None
        assert model.shape.lora is not None
        runs = adapted_rows(param, model.shape, model.layout, self._place)
        return merge(local, a, b, row_numbers(runs, local.device), model.shape.lora.scale)

    @torch.no_grad()
    def _column_amax(self, shards: Parameters) -> Tensor:
        """Return [layer, norm, channel]: the largest weight of each column over the quantized
        readers of a norm on this rank.
        """
        shape = self._model.shape
        amax_LNH = torch.zeros(shape.layers, len(Norm), shape.hidden, device=_device(shards))
        for job, rank in [(job, bucket.rank) for bucket in self._buckets for job in bucket.jobs]:
            norm = job.param.row.norm
            if norm is None:
                continue
            local = self._merged(job.param, shards)
            if local is None or local.ndim == 1:
                continue
            for (piece, part), outs in zip(
                cut(job.param, local, job.slices), job.outputs[rank], strict=True
            ):
                if len(outs) == 1 or not part.numel():
                    continue
                amax_H = part.detach().abs().amax(dim=0).float()
                if not torch.isfinite(amax_H).all():
                    self._fail(f"{piece.name}: {DIVERGED}")
                    continue
                here = amax_LNH[job.param.layer, norm]
                torch.maximum(here, amax_H, out=here)
        return amax_LNH

    def _shared_amax(
        self, bucket: Bucket, parts: Sequence[list[Tensor] | None], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the row amax over the group, by parameter, for rows that are split across
        ranks.
        """
        shared = [
            (job, part) for job, part in zip(bucket.jobs, parts, strict=True) if job.shares_amax
        ]
        if bucket.size == 1 or not shared:
            return {}
        amaxes = [
            row_amax(part[0]) if part else torch.zeros(job.param.shapes[0][0], device=device)
            for job, part in shared
        ]
        flat = torch.cat(amaxes)
        if not bool(torch.isfinite(flat).all()):
            # raised here, because a maximum over ranks may hide a NaN
            bad = next(
                job
                for (job, _), amax in zip(shared, amaxes, strict=True)
                if not torch.isfinite(amax).all()
            )
            self._fail(f"{bad.param.hf[0]}: {DIVERGED}")
            flat = torch.zeros_like(flat)
        bucket.group.max_(flat)
        names = [job.param.megatron for job, _ in shared]
        return dict(zip(names, flat.split([len(amax) for amax in amaxes]), strict=True))

    def _convert(
        self,
        job: BucketEntry,
        parts: Sequence[Tensor] | None,
        rank: int,
        amax: Mapping[str, Tensor],
    ) -> list[Tensor] | None:
        """Return this rank's outputs of one parameter in the order of its job; None if they cannot
        be computed.
        """
        if parts is None or self.failure is not None:
            return None
        made: list[Tensor] = []
        for piece, part, outs in zip(job.slices, parts, job.outputs[rank], strict=True):
            if len(outs) == 1:
                made.append(part.to(PLAIN).contiguous())
                continue
            try:
                result = quantize(part, self.format, amax.get(job.param.megatron))
            except ValueError as error:
                self._fail(f"{piece.name}: {error}")
                return None
            if part.numel():
                self.errors.append(sample_error(part, result, self.format))
            made += [result["weight"].contiguous(), result["weight_scale"].contiguous()]
        return made

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason


def _device(shards: Parameters) -> torch.device:
    if shards:
        return next(iter(shards.values())).device
    return torch.device("cpu")
