"""Interfaces of a sync: learner, sampler, transport; contributions of ranks, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from megatron_rl.quantization.quantize import ErrorSummary, summarize
from megatron_rl.weight_sync.source import ShardSource, SyncSeconds

if TYPE_CHECKING:
    import torch

    from megatron_rl.models.model import Model
    from megatron_rl.models.shards import ShardGroups


def this_rank() -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return 0


class LearnerWeights(Protocol):
    """Interface of a learner rank."""

    @property
    def model(self) -> Model: ...

    @property
    def groups(self) -> ShardGroups: ...

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return this rank's shards by global megatron name (see mapping.global_name)."""

    def take_activation_amax(self) -> torch.Tensor:
        """Return this rank's maxima since the last call, [layer, norm, channel]; called with
        quantization.smoothing.
        """

    def take_cache_amax(self) -> torch.Tensor:
        """Return the largest key and value of each layer since the last call, [layer, 2]; called
        with an FP8 cache.
        """


class SamplerClient(Protocol):
    """Interface of a sampler: the four methods of vLLM's own weight-sync client."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


@dataclass(frozen=True)
class SyncReport:
    version: int
    nbytes: int
    tensors: int
    seconds: SyncSeconds
    error: ErrorSummary | None
    # values that differ from the previous version; None if not compared
    changed_fraction: float | None = None
    first_failure: str = ""  # reason of a retry

    def metrics(self) -> dict[str, float]:
        out = {f"sync/{name}_s": value for name, value in vars(self.seconds).items()}
        out |= {
            "sync/version": float(self.version),
            "sync/bytes": float(self.nbytes),
            "sync/tensors": float(self.tensors),
            "sync/resent": float(bool(self.first_failure)),
        }
        if self.changed_fraction is not None:
            out["sync/changed_fraction"] = self.changed_fraction
        if self.error is not None:
            out |= {
                "sync/quant_error_max": self.error.largest,
                "sync/quant_error_mean": self.error.mean,
                "sync/clamped_fraction": self.error.clamped_fraction,
            }
        return out


@dataclass(frozen=True)
class Contribution:
    """Report of one rank to all others after its part."""

    failure: str | None = None
    nbytes: int = 0
    tensors: int = 0
    seconds: SyncSeconds = field(default_factory=SyncSeconds)
    error: ErrorSummary | None = None
    values: int = 0  # compared with the previous version
    changed: int = 0
    passing: bool = False  # the failure is transient

    @classmethod
    def of(
        cls,
        source: ShardSource,
        elapsed: float,
        failure: str | None,
        passing: bool = False,
        **counts: int,
    ) -> Contribution:
        """Make the contribution after a pass over the source that took `elapsed` seconds, sending
        included.
        """
        made = source.seconds
        seconds = replace(made, transfer=max(0.0, elapsed - made.quantize - made.gather))
        error = summarize(source.errors)
        passing = passing and source.failure is None
        return cls(
            source.failure or failure, seconds=seconds, error=error, passing=passing, **counts
        )

    @classmethod
    def merge(
        cls, parts: Sequence[Contribution], seconds: Callable[[Iterable[float]], float]
    ) -> Contribution:
        """Merge several ranks' parts of a version, or one rank's in several formats; `seconds`:
        `max` or `sum`.
        """
        names = ("quantize", "gather", "transfer")
        return cls(
            next((part.failure for part in parts if part.failure), None),
            sum(part.nbytes for part in parts),
            sum(part.tensors for part in parts),
            SyncSeconds(
                **{name: seconds(getattr(part.seconds, name) for part in parts) for name in names}
            ),
            ErrorSummary.merge(part.error for part in parts),
            sum(part.values for part in parts),
            sum(part.changed for part in parts),
            all(part.passing for part in parts if part.failure),
        )


class Push:
    """Sending side of a transport, on every rank of the learner."""

    def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> Contribution:
        """Send this rank's part of the version; called on every rank, in lockstep. A failure is in
        the result.
        """
        raise NotImplementedError

    def load(self, version: int) -> None:
        """Have the sampler verify and serve the version, or raise; called on rank 0 once every rank
        has sent.
        """
        raise NotImplementedError

    def forget(self, version: int) -> None:
        """Drop a version that some rank could not send; called on rank 0."""

    def tidy(self, version: int, taken: bool) -> None:
        """Clean up files after `load`, accepted or refused; called on rank 0."""

    def start_over(self) -> None:
        """Send the next version in full, after one did not arrive; called on every rank."""

    def close(self) -> None:
        """Release the transport, on every rank at the end."""
