"""Whether what a checkpoint of a run holds can be read: headers and indexes, held against the files. Torch-free."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from megatron_rl.checkpoint.checkpoints import POLICY, RANKS, SYNC, Checkpoint
from megatron_rl.checkpoint.torch_dist.index import read_index
from megatron_rl.checkpoint.torch_dist.pickled import DAMAGED, LARGEST_HEAD, is_plain, read_saved_head
from megatron_rl.models.weight_files import COMMON_FILE, stored_tensors


def look_into(found: Checkpoint) -> None:
    """ValueError or OSError where it cannot."""
    if not read_index(found.path / POLICY):
        raise ValueError(f"{found.path / POLICY} holds no tensors")
    if os.path.lexists(common := found.path / POLICY / COMMON_FILE):  # whether the manifest lists it or not
        _look_at_common(common)
    rest = [SYNC, *(name for name in found.files if name.startswith(f"{RANKS}/"))]
    for name in rest:
        if name not in found.files:
            raise ValueError(f"its manifest lists no {name}")
        stored_tensors(found.path / name)


def _look_at_common(path: Path) -> None:
    """Nothing here reads it, but megatron-core's own load unpickles it: it holds values, and neither names nor data."""
    try:
        if not path.is_file() or path.stat().st_size > 2 * LARGEST_HEAD:
            raise ValueError("it is no file, or larger than any that is written here")
        with zipfile.ZipFile(path) as archive:
            if not all(is_plain(member, LARGEST_HEAD) for member in archive.infolist()):
                raise ValueError("a part of it is packed")
            read_saved_head(archive, ())
    except (*DAMAGED, ValueError) as error:
        raise ValueError(f"{path} is not to be unpickled: {error}") from None
