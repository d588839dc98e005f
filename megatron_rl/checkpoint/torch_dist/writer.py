"""Writer of torch_dist checkpoints as megatron-core writes them: each rank's blocks, and the index.

Each process writes its own file; one of them writes the index, from entries that the others send as
JSON. No process group is needed: a thread can write while the learner continues.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from megatron_rl.checkpoint.torch_dist.index import Entry
from megatron_rl.files import JsonObject, fsync, write_atomic
from megatron_rl.models.tensors import as_bytes, dtype_name, torch_dtype

BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True)
class Block:
    """A part of the tensor `key`, whose whole size is `whole`."""

    key: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    tensor: Tensor


def part_of(
    entry: Entry,
    whole: tuple[int, ...],
    offset: tuple[int, ...],
    values: Tensor,
    kind: str = "",
) -> Block:
    """Part of a parameter, or of its optimizer state: `kind` is then optimizer.state.exp_avg."""
    leading = tuple(length for _, length in entry.axes)
    stacked = tuple(index for index, _ in entry.axes)
    return Block(
        f"{kind}{entry.key}",
        (*leading, *whole),
        (*stacked, *offset),
        values[(None,) * len(leading)],
    )


def write_blocks(
    path: Path, blocks: Iterable[Block], between: Callable[[], None] = lambda: None
) -> list[JsonObject]:
    """Write a file; return its entries for the index. `between`: called after each block."""
    written = []
    with path.open("wb") as file:
        for block in blocks:
            begin = file.tell()
            _save(block, file)
            written.append(
                {
                    "key": block.key,
                    "whole": list(block.whole),
                    "offset": list(block.offset),
                    "size": list(block.tensor.shape),
                    "dtype": dtype_name(block.tensor.dtype),
                    "file": path.name,
                    "begin": begin,
                    "bytes": file.tell() - begin,
                }
            )
            del block  # before the next one is made
            between()
        file.flush()
        os.fsync(file.fileno())
    return written


def _save(block: Block, file: BufferedWriter) -> None:
    try:
        torch.save(_alone(block.tensor), file)
    except (OSError, RuntimeError) as error:
        # closing torch's archive fails after that, and would hide the first error
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(cause.errno, f"{cause.strerror}, at {block.key}", file.name) from None


def _alone(tensor: Tensor) -> Tensor:
    """A tensor's memory under a storage of its own: of a view, torch.save would write all that it
    is a view of.
    """
    raw = as_bytes(tensor).numpy()
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


def write_index(folder: Path, written: Sequence[JsonObject]) -> None:
    """Write the index of a checkpoint, after every process has written its blocks."""
    tensors: dict[str, metadata.TensorStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, _StorageInfo] = {}
    for block in written:
        # a pickle tells equal texts from the same one
        key = sys.intern(block["key"])
        file = sys.intern(block["file"])
        offset = torch.Size(block["offset"])
        properties = metadata.TensorProperties(torch_dtype(block["dtype"]))
        known = tensors.setdefault(
            key, metadata.TensorStorageMetadata(properties, torch.Size(block["whole"]), [])
        )
        known.chunks.append(metadata.ChunkStorageMetadata(offset, torch.Size(block["size"])))
        places[metadata.MetadataIndex(key, offset)] = _StorageInfo(
            file, block["begin"], block["bytes"]
        )
    for key, tensor in tensors.items():
        covered = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if covered != tensor.size.numel():
            raise ValueError(
                f"{folder}: {covered} of {tensor.size.numel()} values of {key} were written"
            )
    torch.save({}, folder / "common.pt")  # megatron-core requires it
    with (folder / ".metadata").open("wb") as index:
        pickle.dump(metadata.Metadata(dict(tensors), storage_data=places), index)
    for name in ("common.pt", ".metadata"):
        fsync(folder / name)
    # last: without it there is no checkpoint
    write_atomic(folder / "metadata.json", json.dumps(BACKEND) + "\n")
