"""Which ranks share a weight with this one."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_rl.distributed import Group, TorchGroup
from megatron_rl.models.layout import Place


@dataclass(frozen=True)
class ShardGroups:
    """This rank's place in the layout, and the groups that share a dense weight, an expert, or anything at all."""

    place: Place = field(default_factory=Place)
    tensor: Group = field(default_factory=TorchGroup)
    expert_tensor: Group = field(default_factory=TorchGroup)
    world: Group = field(default_factory=TorchGroup)
