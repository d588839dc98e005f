"""Weights -> a Hugging Face folder: files of safetensors, their index, and what else the model came with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rl.files import write_whole
from megatron_rl.models.hf_folder import FILE_BYTES, HfFolder, SafetensorsWriter, index_of, make_header, packed
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import INDEX, companions, header_entries, is_plain_name
from megatron_rl.workshop.conversion.outcome import Seen, read_back, write_outcome
from megatron_rl.workshop.conversion.progress import Progress
from megatron_rl.workshop.conversion.side_by_side import GoOn, shared_out, side_by_side
from megatron_rl.workshop.conversion.weights import Weights, digest, of_folder
from megatron_rl.workshop.conversion.work import begun


@dataclass(frozen=True)
class Beside:
    """What stands beside the weights. `changes`: to config.json; None takes a key away."""

    folder: Path  # of config.json, tokenizer, chat template, generation defaults
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()  # files of it that do not belong to what is made
    headers: Mapping[str, bytes] = field(default_factory=dict)  # of the files as they stood: they are made again
    index: Path | None = None


def write_folder(
    weights: Weights,
    target: Path,
    beside: Beside,
    *,
    command: str,
    job: Mapping[str, Any],
    inputs: Sequence[Path],
    note: Callable[[str], None],
    **more: Any,
) -> None:
    """`inputs`, `more`: for parity.json."""
    copied = [name for name in companions(beside.folder) if name not in beside.without]
    headers = _headers(weights, beside)
    entries = {file: header_entries(raw, Path(file)).values() for file, raw in headers.items()}
    sizes = {file: sum(entry.end - entry.start for entry in held) for file, held in entries.items()}
    with begun(target, inputs, {"command": command, **job}, note, sizes) as work:
        with Progress(command, weights.nbytes) as progress:
            for file, raw in headers.items():
                if file in work.finished:
                    progress.add(sizes[file])
                    continue
                digests = _write_file(work.path / file, raw, weights, progress)
                made_of = {name: weights.made_of[name] for name in digests if name in weights.made_of}
                errors = {name: weights.errors[name] for name in digests if name in weights.errors}
                work.finish(file, digests=digests, made_of=made_of, errors=errors)
        for name in copied:
            shutil.copyfile(beside.folder / name, work.path / name)
        if beside.changes:
            _change_config(work.path / "config.json", beside.changes)
        if beside.index is not None:
            shutil.copyfile(beside.index, work.path / INDEX)
        elif not beside.headers and (index := index_of(packed(weights.specs.values(), FILE_BYTES))) is not None:
            write_whole(work.path / INDEX, json.dumps(index, indent=2) + "\n")
        seen = Seen.of(work.finished)
        read_back(of_folder(HfFolder(work.path)), seen.digests, work.path)
        write_outcome(work.path, command, inputs, seen, **more)
        work.publish()


def _headers(weights: Weights, beside: Beside) -> dict[str, bytes]:
    """File -> header; ValueError where the files as they stood do not fit these weights."""
    if not beside.headers:
        return {file: make_header(specs) for file, specs in packed(weights.specs.values(), FILE_BYTES).items()}
    placed: set[str] = set()
    for file, raw in beside.headers.items():
        if not is_plain_name(file):
            raise ValueError(f"{file!r} is no name of a file of weights")
        for name, entry in header_entries(raw, Path(file)).items():
            spec = weights.specs.get(name)
            if spec is None or (entry.dtype, entry.shape) != (DTYPES[spec.dtype][0], spec.shape):
                held = "nothing of that name" if spec is None else f"{DTYPES[spec.dtype][0]} {list(spec.shape)}"
                raise ValueError(
                    f"the header of {file} has a place for {name} as {entry.dtype} {list(entry.shape)}, the weights "
                    f"hold {held}; import the model again"
                )
            placed.add(name)
    lost = sorted(weights.specs.keys() - placed)
    if lost:
        raise ValueError(f"{lost[0]} has no place in the files as they stood; import the model again")
    return dict(beside.headers)


def _write_file(path: Path, raw: bytes, weights: Weights, progress: Progress) -> dict[str, str]:
    """Digests of the tensors by name; they come in the order in which reading them is cheap."""
    digests: dict[str, str] = {}
    with SafetensorsWriter(path, header=raw) as writer:
        held = {name: spec.nbytes for name, spec in weights.specs.items() if name in writer}

        def write(names: list[str], go_on: GoOn) -> None:
            get = weights.open()
            for name in names:
                go_on()
                tensor = get(name)
                try:
                    writer.add(name, tensor)
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror}, at the tensor {name}", str(path)) from error
                digests[name] = digest(tensor)
                progress.add(tensor.nbytes)
                del tensor  # before the next one is read

        side_by_side(write, shared_out(held))
    return {name: digests[name] for name in held}


def _change_config(path: Path, changes: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text()) | dict(changes)
    write_whole(path, json.dumps({key: value for key, value in config.items() if value is not None}, indent=2) + "\n")
