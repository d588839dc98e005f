"""What a sync reports: each rank's contribution, and the whole made of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_rl.quantization.quantize import ErrorSummary


@dataclass(frozen=True)
class SyncSeconds:
    """Where a sync's time goes. The first four are the slowest writer's.

    The driver waits for `load`; an embedded engine on a host generates meanwhile if asked, until it swaps.
    """

    plan: float = 0.0
    quantize: float = 0.0
    gather: float = 0.0
    transfer: float = 0.0  # writing, as far as it does not hide behind the two before
    load: float = 0.0  # verifying, building and swapping in the sampler
    total: float = 0.0


@dataclass(frozen=True)
class SyncReport:
    version: int
    nbytes: int
    tensors: int
    seconds: SyncSeconds
    error: ErrorSummary
    changed_fraction: float | None = None  # values that differ from the version before; None where nobody compared
    first_failure: str = ""  # why it had to be sent again

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
        if self.error.worst:
            out |= {
                "sync/quant_error_max": self.error.worst[0][1],
                "sync/quant_error_mean": self.error.mean,
                "sync/clamped_fraction": self.error.clamped_fraction,
            }
        return out


@dataclass(frozen=True)
class Contribution:
    """What one rank tells all others after its part."""

    failure: str | None = None
    nbytes: int = 0
    tensors: int = 0
    seconds: SyncSeconds = field(default_factory=SyncSeconds)
    error: ErrorSummary = field(default_factory=ErrorSummary)
    values: int = 0  # compared with the version before
    changed: int = 0
    passing: bool = False  # the failure is one that may not come again

    @classmethod
    def sum(cls, parts: Sequence[Contribution]) -> Contribution:
        """One rank's parts of a version in several formats."""
        names = ("quantize", "gather", "transfer")
        return cls(
            next((part.failure for part in parts if part.failure), None),
            sum(part.nbytes for part in parts),
            sum(part.tensors for part in parts),
            SyncSeconds(**{name: sum(getattr(part.seconds, name) for part in parts) for name in names}),
            ErrorSummary.merge(part.error for part in parts),
            sum(part.values for part in parts),
            sum(part.changed for part in parts),
            all(part.passing for part in parts if part.failure),
        )

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, sent: dict[str, Any]) -> Contribution:
        error = dict(sent["error"])
        error["worst"] = tuple((name, value) for name, value in error["worst"])
        return cls(**{**sent, "seconds": SyncSeconds(**sent["seconds"]), "error": ErrorSummary(**error)})
