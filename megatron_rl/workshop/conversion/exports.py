"""`tools/convert.py export` (plain weights -> a Hugging Face folder, an import's as it was to the
byte), and the writer of the folders that dequantize and quantize make, too: safetensors files,
their index, config, tokenizer.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.config.schema import KEPT
from megatron_rl.files import write_whole
from megatron_rl.models.hf_folder import (
    FILE_BYTES,
    SafetensorsWriter,
    index_of,
    make_header,
    packed,
)
from megatron_rl.models.tensors import DTYPES
from megatron_rl.models.weight_files import (
    EMBEDDING,
    INDEX,
    LARGEST_HEADER,
    TIED_COPY,
    companions,
    header_entries,
    is_plain_name,
    refuse_links_out,
)
from megatron_rl.workshop.conversion.sources import Get, Source, Weights, digest, of_folder
from megatron_rl.workshop.conversion.work import Done, begun, shared_out, side_by_side

# of what an import keeps: imports.py
HEADERS = "headers"
EXTRAS = "extras"


@dataclass(frozen=True)
class Beside:
    """Files beside the weights. `changes`: to config.json; None takes a key away."""

    folder: Path  # of config.json, tokenizer, chat template, generation defaults
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()  # files of it that do not belong to what is made
    # of the files as they stood: they are made again
    headers: Mapping[str, bytes] = field(default_factory=dict)
    index: Path | None = None


def export_folder(source: Source, target: Path) -> None:
    weights = source.plain
    beside = Beside(source.folder)
    if source.folder == source.path / KEPT:
        beside = _as_it_stood(source.folder)
    if beside.headers:
        weights = _as_imported(weights, beside, source.shape.tied)
    write_folder(weights, target, beside, "export", [source])


def write_folder(
    weights: Weights,
    target: Path,
    beside: Beside,
    command: str,
    sources: Sequence[Source],
    **about: Any,
) -> None:
    """Write a folder of these weights. `about`: for parity.json."""
    copied = [name for name in companions(beside.folder) if name not in beside.without]
    headers = _headers(weights, beside)
    entries = {file: header_entries(raw, Path(file)).values() for file, raw in headers.items()}
    sizes = {file: sum(entry.end - entry.start for entry in held) for file, held in entries.items()}
    with begun(target, command, sources, sizes) as work:
        for file, raw in headers.items():
            work.digests.update(_write_file(work.path / file, raw, weights, f"{command} {file}"))
        for name in copied:
            shutil.copyfile(beside.folder / name, work.path / name)
        if beside.changes:
            told = json.loads((work.path / "config.json").read_text()) | dict(beside.changes)
            left = {key: value for key, value in told.items() if value is not None}
            write_whole(work.path / "config.json", json.dumps(left, indent=2) + "\n")
        if beside.index is not None:
            shutil.copyfile(beside.index, work.path / INDEX)
        elif (
            not beside.headers
            and (index := index_of(packed(weights.specs.values(), FILE_BYTES))) is not None
        ):
            write_whole(work.path / INDEX, json.dumps(index, indent=2) + "\n")
        work.publish(of_folder(work.path), **about)


def _headers(weights: Weights, beside: Beside) -> dict[str, bytes]:
    """File -> header; ValueError where the files as they stood do not fit these weights."""
    if not beside.headers:
        return {
            file: make_header(specs)
            for file, specs in packed(weights.specs.values(), FILE_BYTES).items()
        }
    placed: set[str] = set()
    for file, raw in beside.headers.items():
        for name, entry in header_entries(raw, Path(file)).items():
            spec = weights.specs.get(name)
            if spec is None or (entry.dtype, entry.shape) != (DTYPES[spec.dtype][0], spec.shape):
                if spec is None:
                    held = "nothing of that name"
                else:
                    held = f"{DTYPES[spec.dtype][0]} {list(spec.shape)}"
                raise ValueError(
                    f"the header of {file} has a place for {name} as {entry.dtype} "
                    f"{list(entry.shape)}, the weights hold {held}; import the model again"
                )
            placed.add(name)
    if lost := sorted(weights.specs.keys() - placed):
        raise ValueError(
            f"{lost[0]} has no place in the files as they stood; import the model again"
        )
    return dict(beside.headers)


def _write_file(path: Path, raw: bytes, weights: Weights, verb: str) -> dict[str, str]:
    """Digests of the tensors by name; they come in the order in which reading them is cheap."""
    digests: dict[str, str] = {}
    with SafetensorsWriter(path, header=raw) as writer:
        held = {name: spec.nbytes for name, spec in weights.specs.items() if name in writer}

        def write(names: list[str], done: Done) -> None:
            get = weights.open()
            for name in names:
                tensor = get(name)
                try:
                    writer.add(name, tensor)
                except OSError as error:
                    raise OSError(
                        error.errno, f"{error.strerror}, at the tensor {name}", str(path)
                    ) from error
                digests[name] = digest(tensor)
                del tensor  # before the next one is read
                done(held[name])

        side_by_side(verb, write, shared_out(held), sum(held.values()))
    return digests


def _as_it_stood(kept: Path) -> Beside:
    """ValueError for headers that are none, and for what leads elsewhere."""
    refuse_links_out(kept, [INDEX, EXTRAS])
    files = sorted((kept / HEADERS).glob("*.header"))
    refuse_links_out(kept, [f"{HEADERS}/{file.name}" for file in files])
    for file in files:
        if (
            not is_plain_name(file.name.removesuffix(".header"))
            or file.stat().st_size > LARGEST_HEADER
        ):
            raise ValueError(
                f"{file} is not the header of a file of weights; import the model again"
            )
    headers = {file.name.removesuffix(".header"): file.read_bytes() for file in files}
    return Beside(
        kept, headers=headers, index=kept / INDEX if headers and (kept / INDEX).is_file() else None
    )


def _as_imported(weights: Weights, beside: Beside, tied: bool) -> Weights:
    """Adds tensors that the checkpoint itself has no place for: extras, and a second copy of tied
    embeddings.
    """
    specs = dict(weights.specs)
    same = dict[str, str]()
    if tied and any(
        TIED_COPY in header_entries(raw, Path(file)) for file, raw in beside.headers.items()
    ):
        specs[TIED_COPY] = replace(specs[EMBEDDING], name=TIED_COPY)
        same[TIED_COPY] = EMBEDDING
    kept = beside.folder / EXTRAS
    if kept.is_dir():
        extras = of_folder(kept)
    else:
        extras = Weights({}, weights.open)
    if both := extras.specs.keys() & specs.keys():
        raise ValueError(
            f"{kept} holds {min(both)}, which the checkpoint has itself; import the model again"
        )
    extra = extras.open()

    def made(name: str, get: Get) -> Tensor:
        if name in extras.specs:
            return extra(name)
        return get(same.get(name, name))

    return weights.made_into({**specs, **extras.specs}, made)
