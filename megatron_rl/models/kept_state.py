"""Whether what a checkpoint of a run holds can be read: headers and indexes, held against the files. Torch-free."""

from __future__ import annotations

from megatron_rl.models.torch_dist_index import read_index
from megatron_rl.models.weight_files import stored_tensors
from megatron_rl.runs.checkpoints import POLICY, RANKS, SYNC, Checkpoint


def look_into(found: Checkpoint) -> None:
    """ValueError or OSError where it cannot."""
    if not read_index(found.path / POLICY):
        raise ValueError(f"{found.path / POLICY} holds no tensors")
    rest = [SYNC, *(name for name in found.files if name.startswith(f"{RANKS}/"))]
    for name in rest:
        if name not in found.files:
            raise ValueError(f"its manifest lists no {name}")
        stored_tensors(found.path / name)
