"""Weights -> a torch_dist checkpoint, which learners of every layout load: files of whole parameters, and an index."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.checkpoint.torch_dist.index import CheckpointError
from megatron_rl.checkpoint.torch_dist.writer import Block, write_blocks, write_index
from megatron_rl.models.mapping import Param, params
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensors import reuse_memory
from megatron_rl.workshop.conversion.outcome import Seen, read_back, write_outcome
from megatron_rl.workshop.conversion.progress import Progress
from megatron_rl.workshop.conversion.side_by_side import GoOn, side_by_side
from megatron_rl.workshop.conversion.weights import Weights, digest, of_checkpoint
from megatron_rl.workshop.conversion.work import begun

FILE_BYTES = 1 << 28  # what each thread of an interrupted conversion does again at most


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
    sizes = {file: sum(_nbytes(param, weights) for param in held) for file, held in files.items()}
    with begun(target, inputs, {"command": command, **job}, note, sizes) as work:
        with Progress(command, sum(sizes.values())) as progress:
            progress.add(sum(sizes[file] for file in work.finished))

            def write(file: str, go_on: GoOn) -> None:
                reuse_memory()
                digests: dict[str, str] = {}
                blocks = _blocks(files[file], shape, weights, digests, progress)
                written = write_blocks(work.path / file, blocks, between=go_on)
                work.finish(file, written=written, digests=digests)

            side_by_side(write, [file for file in files if file not in work.finished])
        write_index(work.path, [block for file in files for block in work.finished[file]["written"]])
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
