#!/usr/bin/env python3
"""Convert between a Hugging Face folder and a Megatron torch_dist checkpoint.

    python tools/convert.py import HF_FOLDER CHECKPOINT
    python tools/convert.py export CHECKPOINT HF_FOLDER [--hf ORIGINAL_HF_FOLDER]

A torch_dist checkpoint belongs to no layout: any tensor, pipeline or expert parallel size loads it. An import
keeps config.json, tokenizer and file headers beside the weights (in CHECKPOINT/hf), so that an export gives the
same files back, byte for byte. A checkpoint without them takes config.json and tokenizer from --hf.
Runs without a GPU; an import holds the model in memory once, an export one tensor at a time.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_rl.config import ConfigError
from megatron_rl.models import torch_dist
from megatron_rl.models.hf_folder import (
    INDEX,
    HfFolder,
    HfFolderWriter,
    copy_companions,
    write_folder,
)
from megatron_rl.models.model import read_hf_config
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.torch_dist import CheckpointError
from megatron_rl.models.weight_files import EMBEDDING, HARMLESS, TIED_COPY

KEPT = "hf"  # what an import keeps of the Hugging Face folder, inside the checkpoint
HEADERS = "headers"
EXTRAS = "extras"
PROGRESS_EVERY_S = 2.0


class Progress:
    def __init__(self, verb: str, total: int) -> None:
        self._verb, self._total = verb, total
        self._count = self._bytes = 0
        self._started = self._shown = time.monotonic()

    def add(self, nbytes: int) -> None:
        self._count, self._bytes = self._count + 1, self._bytes + nbytes
        if self._count == self._total or time.monotonic() - self._shown >= PROGRESS_EVERY_S:
            self._shown = time.monotonic()
            seconds = self._shown - self._started
            size = f"{self._bytes / 2**20:.1f} MiB"
            print(f"{self._verb} {self._count}/{self._total} tensors, {size}, {seconds:.0f} s", file=sys.stderr)


def import_folder(source: Path, target: Path) -> None:
    """Hugging Face folder -> checkpoint."""
    _refuse_existing(target)
    folder = HfFolder(source)
    hf_config = read_hf_config(source, key="HF_FOLDER")
    shape = ModelShape.from_hf(hf_config)
    extras = _check_names(folder, shape)
    sizes = torch_dist.hf_shapes(shape)
    progress = Progress("read", len(sizes))

    def get(name: str) -> torch.Tensor:
        tensor = folder.get(name)
        if tuple(tensor.shape) != sizes[name]:
            raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, config.json says {sizes[name]}")
        progress.add(tensor.nbytes)
        return tensor

    from megatron_rl.learner import host  # before megatron

    host.install()
    with _completed(target) as partial:
        torch_dist.save(partial, shape, get)
        kept = partial / KEPT
        copy_companions(source, kept)
        if (source / INDEX).is_file():
            shutil.copyfile(source / INDEX, kept / INDEX)
        (kept / HEADERS).mkdir()
        for file, header in folder.headers.items():
            (kept / HEADERS / f"{file}.header").write_bytes(header)
        if extras:
            write_folder(kept / EXTRAS, {name: folder.get(name) for name in extras}, hf_config)
    print(f"wrote the checkpoint {target}")


def export_folder(source: Path, target: Path, original: Path | None = None) -> None:
    """Checkpoint -> Hugging Face folder."""
    _refuse_existing(target)
    reader = torch_dist.Reader(source)
    companions = original or source / KEPT
    if not companions.is_dir():
        raise CheckpointError(
            f"{source} keeps no {KEPT}/ folder with config.json and tokenizer: name the model's original Hugging Face "
            "folder with --hf"
        )
    shape = ModelShape.from_hf(read_hf_config(companions, key="HF_FOLDER"))
    specs = torch_dist.specs(reader, shape)
    headers = _headers(companions)
    progress = Progress("wrote", len(specs))
    with _completed(target) as partial:
        copy_companions(companions, partial)
        if headers and (companions / INDEX).is_file():
            shutil.copyfile(companions / INDEX, partial / INDEX)
        with HfFolderWriter(partial, specs, headers or None) as writer:
            for name, tensor in torch_dist.tensors(reader, shape):
                writer.add(name, tensor)
                if shape.tied and name == EMBEDDING and TIED_COPY in writer:
                    writer.add(TIED_COPY, tensor)
                progress.add(tensor.nbytes)
            if headers and (companions / EXTRAS).is_dir():
                extras = HfFolder(companions / EXTRAS)
                for name in extras.names:
                    writer.add(name, extras.get(name))
    print(f"wrote the Hugging Face folder {target}")


@contextmanager
def _completed(target: Path) -> Iterator[Path]:
    """A folder that takes its name only when it is complete."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _headers(kept: Path) -> dict[str, bytes]:
    files = sorted((kept / HEADERS).glob("*.header"))
    return {file.name.removesuffix(".header"): file.read_bytes() for file in files}


def _check_names(folder: HfFolder, shape: ModelShape) -> list[str]:
    """Refuses missing and unknown tensors; returns harmless ones that are kept aside as they are."""
    wanted = set(torch_dist.hf_shapes(shape))
    missing = sorted(wanted - set(folder.names))
    if missing:
        raise CheckpointError(f"{folder.path} lacks {len(missing)} tensors, first {missing[0]}")
    extras = []
    for name in sorted(set(folder.names) - wanted):
        if name.endswith(HARMLESS):
            extras.append(name)
        elif name == TIED_COPY and shape.tied:
            if not torch.equal(folder.get(name), folder.get(EMBEDDING)):
                raise CheckpointError(
                    f"{folder.path}: config.json ties the embeddings, but {TIED_COPY} differs from {EMBEDDING}"
                )
        else:
            raise CheckpointError(f"{folder.path} holds {name}, which a {shape.family} model does not have")
    return extras


def _refuse_existing(target: Path) -> None:
    if target.exists():
        raise CheckpointError(f"{target} exists already: name another target, or remove it first")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("import", help="Hugging Face folder -> torch_dist checkpoint")
    to_hf = commands.add_parser("export", help="torch_dist checkpoint -> Hugging Face folder")
    for command in (to_megatron, to_hf):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    to_hf.add_argument("--hf", type=Path, help="folder with config.json and tokenizer, where the checkpoint has none")
    given = parser.parse_args(argv)
    try:
        if given.command == "import":
            import_folder(given.source, given.target)
        else:
            export_folder(given.source, given.target, given.hf)
    except (CheckpointError, ConfigError, OSError, ValueError, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
