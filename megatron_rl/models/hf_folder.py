"""Hugging Face model folders, streamed: one tensor in memory at a time, in or out.

Reads one model.safetensors or an index with many; writes either. The writer knows every name, dtype and shape
before the first byte, so tensors may arrive in any order and land at their final place in the file.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open

from megatron_rl.files import replacing, write_whole
from megatron_rl.models.tensors import DTYPES, TensorSpec, torch_dtype
from megatron_rl.models.weight_files import INDEX, SINGLE, companions, header_entries, read_header, weight_files

_DTYPE_NAMES = {stored: name for name, (stored, _) in DTYPES.items()}  # by their name in safetensors


class HfFolder:
    """Read side: `names` without touching data, `get(name)`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"{self.path} is not a folder; give a Hugging Face model folder")
        self.files = weight_files(self.path)
        self.headers = {file: read_header(self.path / file) for file in self.files}
        self._file_of: dict[str, str] = {}
        for file, raw in self.headers.items():
            for name in json.loads(raw):
                if name != "__metadata__":
                    self._file_of[name] = file
        self._open: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def get(self, name: str) -> torch.Tensor:
        file = self._file(name)
        if file not in self._open:
            self._open[file] = safe_open(self.path / file, framework="pt")
        return self._open[file].get_tensor(name)

    def _file(self, name: str) -> str:
        if name not in self._file_of:
            raise KeyError(f"{self.path} lacks the tensor {name}")
        return self._file_of[name]


class _Discarded(Exception):
    """A file is not to be completed."""


class SafetensorsWriter:
    """One safetensors file, written in any order; it takes its name when it is complete."""

    def __init__(self, path: Path, specs: Sequence[TensorSpec] = (), header: bytes | None = None) -> None:
        """`header`: an existing file's own header bytes, to be reproduced exactly; otherwise made from `specs`."""
        self.path = path
        raw = make_header(specs) if header is None else header
        self._entries = header_entries(raw, path)
        self.missing = set(self._entries)
        self._base = 8 + len(raw)
        self._whole = ExitStack()
        self._file = self._whole.enter_context(self._whole.enter_context(replacing(path)).open("wb"))
        self._file.write(struct.pack("<Q", len(raw)) + raw)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def add(self, name: str, tensor: torch.Tensor) -> None:
        entry = self._entries[name]
        if entry.dtype not in _DTYPE_NAMES:
            raise ValueError(f"{name} has a place of dtype {entry.dtype}, expected one of {', '.join(_DTYPE_NAMES)}")
        wanted = (torch_dtype(_DTYPE_NAMES[entry.dtype]), entry.shape)
        if (tensor.dtype, tuple(tensor.shape)) != wanted:
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, its place is {wanted[0]} {wanted[1]}")
        self._file.seek(self._base + entry.start)
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self.missing.discard(name)

    def close(self) -> None:
        if self.missing:
            self.discard()
            raise ValueError(f"{self.path} would lack {len(self.missing)} tensors, first {min(self.missing)}")
        self._whole.close()

    def discard(self) -> None:
        with suppress(_Discarded), self._whole:
            raise _Discarded


def make_header(specs: Sequence[TensorSpec]) -> bytes:
    """Entries ordered as the safetensors library orders them: by dtype, then by name."""
    order = list(DTYPES)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in sorted(specs, key=lambda spec: (order.index(spec.dtype), spec.name)):
        entries[spec.name] = {
            "dtype": DTYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    return raw + b" " * (-len(raw) % 8)


class HfFolderWriter:
    """Write side, a context manager: `add(name, tensor)` in any order; leaving it without an error completes it.

    `headers` (file name -> header bytes) reproduces an existing folder's files; otherwise `specs` are packed
    into files of at most `max_file_bytes`.
    """

    def __init__(
        self,
        path: Path,
        specs: Sequence[TensorSpec] = (),
        headers: Mapping[str, bytes] | None = None,
        max_file_bytes: int = 5 << 30,
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._index: dict[str, Any] | None = None
        if headers is not None:
            self._writers = [SafetensorsWriter(path / file, header=raw) for file, raw in headers.items()]
            return
        groups = _pack(specs, max_file_bytes)
        if len(groups) == 1:
            self._writers = [SafetensorsWriter(path / SINGLE, groups[0])]
            return
        names = [f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" for i in range(len(groups))]
        self._writers = [SafetensorsWriter(path / name, group) for name, group in zip(names, groups, strict=True)]
        self._index = {
            "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
            "weight_map": {s.name: name for name, group in zip(names, groups, strict=True) for s in group},
        }

    def __contains__(self, name: object) -> bool:
        return any(name in writer for writer in self._writers)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        for writer in self._writers:
            if name in writer:
                writer.add(name, tensor)
                return
        raise KeyError(f"{name} has no place in {self.path}")

    def __enter__(self) -> HfFolderWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        complete = kind is None and not any(writer.missing for writer in self._writers)
        with ExitStack() as each:  # one that lacks a tensor says so, after the others are gone
            for writer in self._writers:
                each.callback(writer.close if complete or (writer.missing and kind is None) else writer.discard)
        if complete and self._index is not None:
            write_whole(self.path / INDEX, json.dumps(self._index, indent=2) + "\n")


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy everything but weights and their index (config, tokenizer, generation defaults); returns the names."""
    target.mkdir(parents=True, exist_ok=True)
    names = companions(source)
    for name in names:
        shutil.copyfile(source / name, target / name)
    return names


def write_folder(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """A small model at once: its tensors and config.json."""
    specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
    with HfFolderWriter(path, specs) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def _pack(specs: Iterable[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    return groups
