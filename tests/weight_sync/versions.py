"""Chains of versions, and damage to their files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_rl.weight_sync.delta import Sent
from megatron_rl.weight_sync.file_reader import Staged
from megatron_rl.weight_sync.file_transport import write_version
from megatron_rl.weight_sync.manifest import Manifest


def write_chain(
    folder: Path,
    versions: Iterable[Mapping[str, torch.Tensor]],
    *,
    first: int = 0,
    sent: Sent | None = None,
    **how: Any,
) -> list[Manifest]:
    """Write versions one after the other: with `sent` each is a patch of the one before."""
    written = []
    for version, tensors in enumerate(versions, start=first):
        base = version - 1 if sent and written else None
        pairs = tensors.items()
        written.append(
            write_version(folder, version, pairs, format="int8", sent=sent, base=base, **how)
        )
    return written


def checked(staged: Staged) -> Staged:
    """A version of which every tensor was read once."""
    for name in staged.tensors:
        staged.tensors[name]
    return staged


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
