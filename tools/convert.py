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
import multiprocessing.util
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_rl.config.schema import KEPT
from megatron_rl.files import partial_of, remove, replacing
from megatron_rl.processes.process import die_with_parent, started_at

if TYPE_CHECKING:
    import torch

    from megatron_rl.models.hf_folder import HfFolder
    from megatron_rl.models.shape import ModelShape

HEADERS = "headers"  # of the weight files, as they stood
EXTRAS = "extras"
PROGRESS_EVERY_S = 2.0
CLOCKS_S = 2.0  # between the clocks of a file system and of the kernel
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


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
    from megatron_rl.learner import host  # before megatron
    from megatron_rl.models import torch_dist
    from megatron_rl.models.hf_folder import INDEX, HfFolder, copy_companions, write_folder
    from megatron_rl.models.model import read_hf_config
    from megatron_rl.models.shape import ModelShape
    from megatron_rl.models.torch_dist import CheckpointError
    from megatron_rl.models.weight_files import companions, refuse_links_out

    _refuse_target(source, target)
    folder = HfFolder(source)
    kept_index = [INDEX] if (source / INDEX).is_file() else []
    refuse_links_out(source, [*companions(source), *folder.files, *kept_index])
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

    host.install()
    with replacing(target) as partial:
        partial.mkdir(parents=True)
        torch_dist.save(partial, shape, get)
        kept = partial / KEPT
        copy_companions(source, kept)
        for name in kept_index:
            shutil.copyfile(source / name, kept / name)
        (kept / HEADERS).mkdir()
        for file, header in folder.headers.items():
            (kept / HEADERS / f"{file}.header").write_bytes(header)
        if extras:
            write_folder(kept / EXTRAS, {name: folder.get(name) for name in extras}, hf_config)
    print(f"wrote the checkpoint {target}")


def export_folder(source: Path, target: Path, original: Path | None = None) -> None:
    """Checkpoint -> Hugging Face folder."""
    from megatron_rl.models import torch_dist
    from megatron_rl.models.hf_folder import INDEX, HfFolder, HfFolderWriter, copy_companions
    from megatron_rl.models.model import read_hf_config
    from megatron_rl.models.shape import ModelShape
    from megatron_rl.models.torch_dist import CheckpointError
    from megatron_rl.models.weight_files import EMBEDDING, TIED_COPY, refuse_links_out

    _refuse_target(source, target)
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
    kept_index = [INDEX] if headers and (companions / INDEX).is_file() else []
    refuse_links_out(companions, [*kept_index, EXTRAS])
    progress = Progress("wrote", len(specs))
    with replacing(target) as partial:
        copy_companions(companions, partial)
        for name in kept_index:
            shutil.copyfile(companions / name, partial / name)
        with HfFolderWriter(partial, specs, headers or None) as writer:
            for name, tensor in torch_dist.tensors(reader, shape):
                writer.add(name, tensor)
                if shape.tied and name == EMBEDDING and TIED_COPY in writer:
                    writer.add(TIED_COPY, tensor)
                progress.add(tensor.nbytes)
            if headers and (companions / EXTRAS).is_dir():
                extras = HfFolder(companions / EXTRAS)
                refuse_links_out(companions / EXTRAS, extras.files)
                for name in extras.names:
                    writer.add(name, extras.get(name))
    print(f"wrote the Hugging Face folder {target}")


def _headers(kept: Path) -> dict[str, bytes]:
    from megatron_rl.models.weight_files import LARGEST_HEADER, is_plain_name, refuse_links_out

    files = sorted((kept / HEADERS).glob("*.header"))
    refuse_links_out(kept, [f"{HEADERS}/{file.name}" for file in files])
    for file in files:
        if not is_plain_name(file.name.removesuffix(".header")) or file.stat().st_size > LARGEST_HEADER:
            raise ValueError(f"{file} is not the header of a file of weights; import the model again")
    return {file.name.removesuffix(".header"): file.read_bytes() for file in files}


def _check_names(folder: HfFolder, shape: ModelShape) -> list[str]:
    """Refuses missing and unknown tensors; returns harmless ones that are kept aside as they are."""
    import torch

    from megatron_rl.models import torch_dist
    from megatron_rl.models.torch_dist import CheckpointError
    from megatron_rl.models.weight_files import EMBEDDING, HARMLESS, TIED_COPY

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


def remove_leftovers(target: Path) -> Iterator[Path]:
    """What conversions to this target that were killed, by this user on this machine, had begun to write."""
    before, _, after = partial_of(target, 0).name.rpartition("0")
    pattern = re.compile(f"{re.escape(before)}([0-9]{{1,9}}){re.escape(after)}")
    for found in sorted(target.absolute().parent.glob(".*.partial")):
        number, about = pattern.fullmatch(found.name), found.lstat()
        if number is None or about.st_uid != os.geteuid():
            continue
        started = started_at(int(number[1]))
        if started is None or started > about.st_mtime + CLOCKS_S:  # another process, of the same number
            remove(found)
            yield found


def _refuse_target(source: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already: name another target, or remove it first")
    if target.resolve().is_relative_to(source.resolve()):
        raise ValueError(f"{target} lies inside {source}, which is only read: name a target elsewhere")


def main(argv: Sequence[str] | None = None) -> int:
    given = _parse(argv)
    from megatron_rl.config import ConfigError
    from megatron_rl.models.torch_dist import CheckpointError

    try:
        for found in remove_leftovers(given.target):
            print(f"removed {found}, which a conversion that was killed had begun", file=sys.stderr)
        if given.command == "import":
            import_folder(given.source, given.target)
        else:
            export_folder(given.source, given.target, given.hf)
    except (CheckpointError, ConfigError, OSError, ValueError, KeyError) as error:
        print(f"error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    to_megatron = commands.add_parser("import", help="Hugging Face folder -> torch_dist checkpoint")
    to_hf = commands.add_parser("export", help="torch_dist checkpoint -> Hugging Face folder")
    for command in (to_megatron, to_hf):
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
    to_hf.add_argument("--hf", type=Path, help="folder with config.json and tokenizer, where the checkpoint has none")
    return parser.parse_args(argv)


def watched(argv: Sequence[str] | None = None) -> int:
    """`main` in a process group of its own: megatron's writer waits for its children, so that all are ended at once."""
    target = _parse(argv).target
    # private, and gone with this process: the writer's sockets, and what megatron's imports leave behind
    os.environ["TMPDIR"] = tempfile.tempdir = multiprocessing.util.get_temp_dir()
    signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.setpgid(0, 0)
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGCHLD})
        return main(argv)
    with suppress(OSError):  # it has done so itself
        os.setpgid(child, child)
    asked = ""
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        number = signal.sigwait({*ENDING, signal.SIGCHLD})
        if number != signal.SIGCHLD:
            asked = signal.Signals(number).name
            _end_group(child)
    status = os.waitstatus_to_exitcode(ended[1])
    if status >= 0:
        return status
    _end_group(child)
    shutil.rmtree(partial_of(target, child), ignore_errors=True)
    reason = f"interrupted by {asked}" if asked else f"killed by {signal.Signals(-status).name}, out of memory?"
    print(f"error: {reason}: {target} was not written", file=sys.stderr)
    return 128 + (signal.Signals[asked] if asked else -status)


def _end_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(watched())
