"""`tools/convert.py export`: plain weights -> a Hugging Face folder, an import's as it was to the
byte; and the writer of the folders that dequantize and quantize make.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_rl.apps.conversion.sources import Get, Source, Weights, digest, of_folder
from megatron_rl.apps.conversion.work import begun, progress
from megatron_rl.config.schema import KEPT
from megatron_rl.files import write_json
from megatron_rl.models.hf_folder import (
    FILE_BYTES,
    HfFolder,
    SafetensorsWriter,
    index_of,
    make_header,
    packed,
)
from megatron_rl.models.weight_files import (
    EMBEDDING,
    INDEX,
    LARGEST_HEADER,
    TIED_COPY,
    companions,
    is_plain_name,
    placed,
    refuse_links_out,
)

# of what an import keeps: imports.py
HEADERS = "headers"
EXTRAS = "extras"
DTYPE = "bfloat16"  # of what dequantize and quantize leave unquantized


@dataclass(frozen=True)
class Beside:
    """Files beside the weights. `changes`: to config.json; None takes a key away."""

    folder: Path  # of config.json, tokenizer, chat template, generation defaults
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()  # files of it that do not belong to what is made
    headers: Mapping[str, bytes] = field(default_factory=dict)  # of the files as they stood


def plain_dtype(config: Mapping[str, Any]) -> dict[str, str]:
    """The entry of config.json by which unquantized weights are in BF16."""
    return {"dtype" if "dtype" in config else "torch_dtype": DTYPE}


def export_folder(source: Source, target: Path) -> None:
    weights = source.plain
    beside = Beside(source.folder)
    if source.folder == source.path / KEPT:
        beside = Beside(source.folder, headers=_headers_kept(source.folder))
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
    files = packed(weights.specs.values(), FILE_BYTES)
    headers = beside.headers or {file: make_header(specs) for file, specs in files.items()}
    with begun(target, command, sources, weights.nbytes) as work:
        for file, raw in headers.items():
            work.digests.update(_write_file(work.path / file, raw, weights, f"{command} {file}"))
        if lost := weights.specs.keys() - work.digests.keys():
            raise ValueError(
                f"{min(lost)} has no place in the files as they stood; import the model again"
            )
        for name in copied:
            shutil.copyfile(beside.folder / name, work.path / name)
        if beside.changes:
            config = json.loads((work.path / "config.json").read_text()) | dict(beside.changes)
            left = {key: value for key, value in config.items() if value is not None}
            write_json(work.path / "config.json", left)
        if beside.headers:
            if (beside.folder / INDEX).is_file():
                shutil.copyfile(beside.folder / INDEX, work.path / INDEX)
        elif (index := index_of(files)) is not None:
            write_json(work.path / INDEX, index)
        work.publish(of_folder(work.path), **about)


def _write_file(path: Path, raw: bytes, weights: Weights, verb: str) -> dict[str, str]:
    """Digests of the tensors by name; they come in the order in which reading them is cheap."""
    digests: dict[str, str] = {}
    get = weights.open()
    with SafetensorsWriter(path, header=raw) as writer:
        for name in progress(verb, [name for name in weights.specs if name in writer]):
            tensor = get(name)
            writer.add(name, tensor)
            digests[name] = digest(tensor)
            del tensor  # before the next one is read
    return digests


def _headers_kept(kept: Path) -> dict[str, bytes]:
    """The headers by file; ValueError for headers that are none, and for what leads elsewhere."""
    files = sorted((kept / HEADERS).glob("*.header"))
    refuse_links_out(kept, [INDEX, EXTRAS, *(f"{HEADERS}/{file.name}" for file in files)])
    for file in files:
        if file.stat().st_size > LARGEST_HEADER or not is_plain_name(file.stem):
            raise ValueError(f"{file} is not the header of a file of weights; import again")
    return {file.stem: file.read_bytes() for file in files}


def _as_imported(weights: Weights, beside: Beside, tied: bool) -> Weights:
    """Add tensors that the checkpoint itself lacks: extras, and a copy of tied embeddings."""
    specs = dict(weights.specs)
    names = {name for file, raw in beside.headers.items() for name in placed(raw, Path(file))}
    if tied and TIED_COPY in names:
        specs[TIED_COPY] = replace(specs[EMBEDDING], name=TIED_COPY)
    extras = {}
    if (beside.folder / EXTRAS).is_dir():
        kept = HfFolder(beside.folder / EXTRAS)
        refuse_links_out(kept.path, kept.files)
        extras = {name: kept.spec(name) for name in kept.names if name not in specs}

    def made(name: str, get: Get) -> Tensor:
        if name in extras:
            return kept.read(name)
        return get(EMBEDDING if tied and name == TIED_COPY else name)

    return weights.made_into({**specs, **extras}, made)
