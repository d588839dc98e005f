"""What a sync asks of the learner, of the sampler, and of whatever carries a version between the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from megatron_rl.models.model import Model
    from megatron_rl.models.shards import ShardGroups
    from megatron_rl.weight_sync.report import Contribution


class LearnerWeights(Protocol):
    """One rank of the learner."""

    @property
    def model(self) -> Model: ...

    @property
    def groups(self) -> ShardGroups: ...

    def named_parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """This rank's shards by global megatron name (see mapping.global_name)."""

    def take_activation_amax(self) -> torch.Tensor:
        """What this rank saw since the last call, [layer, norm, channel]: asked for with quantization.smoothing."""

    def take_cache_amax(self) -> torch.Tensor:
        """Largest key and value of each layer since the last call, [layer, 2]: asked for with an FP8 cache."""


class SamplerClient(Protocol):
    """The four methods of vLLM's own weight-sync client."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self, weight_version: str | None = None) -> None: ...


class Push(Protocol):
    """One transport's sending half, on every rank of the learner."""

    def send(self, version: int, parameters: Mapping[str, torch.Tensor]) -> Contribution:
        """Every rank, in lockstep: this rank's part of the version on its way. A failure is in what it returns."""

    def load(self, version: int) -> None:
        """Rank 0, once every rank has sent: the sampler verifies the version and serves it, or this raises."""

    def forget(self, version: int) -> None:
        """Rank 0: some rank could not send its part, the version will never be loaded."""

    def tidy(self, version: int, taken: bool) -> None:
        """Rank 0, after `load`: what is kept of a version, now that the sampler has taken or refused it."""

    def start_over(self) -> None:
        """Every rank, after a version did not arrive: nothing may build on it, the next one is whole."""

    def close(self) -> None: ...
