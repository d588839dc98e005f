"""Weights -> a torch_dist checkpoint, which learners of every layout load: files of whole parameters, and an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.conversion.outcome import Seen, read_back, write_outcome
from megatron_rl.conversion.progress import Progress
from megatron_rl.conversion.weights import Weights, digest, of_checkpoint
from megatron_rl.conversion.work import begun
from megatron_rl.models import torch_dist
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.torch_dist_index import CheckpointError
from megatron_rl.models.torch_dist_writer import Block, write_blocks, write_index

FILE_BYTES = 1 << 30  # what an interrupted conversion does again at most


def write_checkpoint(
    weights: Weights,
    shape: ModelShape,
    target: Path,
    *,
    command: str,
    job: Mapping[str, Any],
    inputs: Sequence[Path],
    note: Callable[[str], None],
    keep: Callable[[Path], None],
) -> None:
    """`keep`: puts the rest into the folder. `inputs`: for parity.json."""
    files = _files(weights, shape)
    with begun(target, inputs, {"command": command, **job}, note) as work:
        with Progress(command, sum(_nbytes(param, weights) for held in files.values() for param in held)) as progress:
            for file, held in files.items():
                if file in work.finished:
                    progress.add(sum(_nbytes(param, weights) for param in held))
                    continue
                digests: dict[str, str] = {}
                blocks = _blocks(held, shape, weights, digests, progress)
                work.finish(file, written=write_blocks(work.path / file, blocks), digests=digests)
        write_index(work.path, [block for about in work.finished.values() for block in about["written"]])
        keep(work.path)
        seen = Seen.of(work.finished)
        read_back(of_checkpoint(torch_dist.Reader(work.path), shape), seen.digests, work.path)
        write_outcome(work.path, command, inputs, seen)
        work.publish()


def _files(weights: Weights, shape: ModelShape) -> dict[str, list[Param]]:
    """Whole parameters, as many in a file as fit."""
    groups: list[list[Param]] = [[]]
    size = 0
    for param in params(shape):
        if param.row.copy:
            continue
        dtypes = {weights.specs[name].dtype for name in param.hf}
        if len(dtypes) > 1:
            raise CheckpointError(f"{', '.join(param.hf)} have different dtypes but share one megatron parameter")
        if groups[-1] and size + _nbytes(param, weights) > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += _nbytes(param, weights)
    return {f"weights_{number}.distcp": group for number, group in enumerate(groups)}


def _nbytes(param: Param, weights: Weights) -> int:
    return sum(weights.specs[name].nbytes for name in param.hf)


def _blocks(
    held: Sequence[Param], shape: ModelShape, weights: Weights, digests: dict[str, str], progress: Progress
) -> Iterator[Block]:
    get = weights.open()

    def taken(name: str) -> torch.Tensor:
        tensor = get(name)
        digests[name] = digest(tensor)
        progress.add(tensor.nbytes)
        return tensor

    for param in held:
        yield from torch_dist.blocks(param, shape, map(taken, param.hf))
