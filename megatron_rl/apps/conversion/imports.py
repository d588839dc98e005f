"""`tools/convert.py import`: a Hugging Face folder -> a torch_dist checkpoint, which learners of
every layout load.

Beside one file of whole parameters and its index, CHECKPOINT/hf/ keeps what an export needs to give
the folder back:
  config.json, tokenizer, ...    as they were
  model.safetensors.index.json   where there was one
  headers/                       of each file of weights: which tensor lies where in it
  extras/                        tensors that no model needs: a Hugging Face folder of its own
"""

import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch

from megatron_rl.apps.conversion.exports import EXTRAS, HEADERS
from megatron_rl.apps.conversion.sources import Source, digest, of_checkpoint
from megatron_rl.apps.conversion.work import begun, progress
from megatron_rl.checkpoint.torch_dist import reader as torch_dist
from megatron_rl.checkpoint.torch_dist.index import CheckpointError
from megatron_rl.checkpoint.torch_dist.writer import write_blocks, write_index
from megatron_rl.config.schema import KEPT
from megatron_rl.models.hf_folder import HfFolder, copy_companions, write_folder
from megatron_rl.models.mapping import stored_params
from megatron_rl.models.weight_files import (
    EMBEDDING,
    HARMLESS,
    INDEX,
    TIED_COPY,
    companions,
    refuse_links_out,
)


def import_folder(source: Source, target: Path) -> None:
    if not source.is_folder:
        raise ValueError(f"{source.path} is a checkpoint; import takes a Hugging Face folder")
    weights = source.plain
    shape = source.shape
    folder = HfFolder(source.path)
    refuse_links_out(folder.path, [*companions(folder.path), INDEX])
    source.refuse_misfits()
    get = weights.open()
    twice = shape.tied and TIED_COPY in weights.specs
    if twice and digest(get(TIED_COPY)) != digest(get(EMBEDDING)):
        raise ValueError(
            f"{folder.path}: config.json ties the embeddings, but {TIED_COPY} differs from "
            f"{EMBEDDING}"
        )
    extras = [name for name in weights.specs if name.endswith(HARMLESS)]
    whole = list(stored_params(shape))
    for param in whole:
        if len({weights.specs[name].dtype for name in param.hf}) > 1:
            raise CheckpointError(f"{', '.join(param.hf)} have different dtypes, expected one")
    with begun(target, "import", [source], weights.nbytes) as work:

        def taken(name: str) -> torch.Tensor:
            tensor = get(name)
            work.digests[name] = digest(tensor)
            return tensor

        blocks = (
            torch_dist.blocks(param, shape, map(taken, param.hf))
            for param in progress("import", whole)
        )
        written = write_blocks(work.path / "weights.distcp", chain.from_iterable(blocks))
        write_index(work.path, written)
        _keep(folder, extras, source, work.path / KEPT)
        work.publish(of_checkpoint(work.path, shape))


def _keep(folder: HfFolder, extras: Sequence[str], source: Source, kept: Path) -> None:
    copy_companions(folder.path, kept)
    if (folder.path / INDEX).is_file():
        shutil.copyfile(folder.path / INDEX, kept / INDEX)
    (kept / HEADERS).mkdir()
    for file, header in folder.headers.items():
        (kept / HEADERS / f"{file}.header").write_bytes(header)
    if extras:
        write_folder(kept / EXTRAS, {name: folder.read(name) for name in extras}, source.hf_config)
