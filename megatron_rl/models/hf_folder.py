"""Reader and writer of Hugging Face model folders, one tensor in memory at a time.

The writer knows every name, dtype and shape before the first byte, so that tensors may arrive in
any order. Other files are copied.
"""

import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from megatron_rl.files import JsonObject, replacing, write_atomic
from megatron_rl.models.tensors import DTYPES, TensorSpec, as_bytes, torch_dtype
from megatron_rl.models.weight_files import (
    INDEX,
    SINGLE,
    Stored,
    companions,
    placed,
    read_header,
    weight_files,
)

FILE_BYTES = 5 << 30
LARGEST_PIECE = 1 << 30  # the kernel writes no more than 2 GiB at once
# by their name in safetensors
_DTYPE_NAMES = {stored: name for name, (stored, _) in DTYPES.items()}


class HfFolder:
    """Read side: `names` without touching data, `get(name)`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(
                f"{self.path} is not a folder; give a Hugging Face model folder"
            )
        self.files = weight_files(self.path)
        self.headers = {file: read_header(self.path / file) for file in self.files}
        self.stored: dict[str, Stored] = {}
        for file, raw in self.headers.items():
            for name, stored in placed(raw, self.path / file).items():
                if name in self.stored:
                    raise ValueError(
                        f"{name} is in {self.stored[name].file.name} and in {file} of {self.path}"
                    )
                self.stored[name] = stored
        self._open: dict[Path, Any] = {}

    @property
    def names(self) -> list[str]:
        return list(self.stored)

    def get(self, name: str) -> Tensor:
        """A view of the file: only what is looked at is read, and it stays mapped."""
        file = self._place(name).file
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_tensor(name)

    def read(self, name: str) -> Tensor:
        """Read a tensor into its own memory, which is freed with its last reference."""
        return read_stored(name, self._place(name))

    def spec(self, name: str) -> TensorSpec:
        return spec_of(name, self._place(name))

    def _place(self, name: str) -> Stored:
        if name not in self.stored:
            raise KeyError(f"{self.path} lacks the tensor {name}")
        return self.stored[name]


def read_stored(name: str, stored: Stored) -> Tensor:
    spec = spec_of(name, stored)
    values = np.fromfile(stored.file, np.uint8, stored.nbytes, offset=stored.start)
    if len(values) < stored.nbytes:
        raise ValueError(f"{stored.file} is cut off in the middle of {name}")
    return torch.from_numpy(values).view(torch_dtype(spec.dtype)).view(stored.shape)


def spec_of(name: str, stored: Stored) -> TensorSpec:
    if stored.dtype not in _DTYPE_NAMES:
        raise ValueError(
            f"{name} of {stored.file} is {stored.dtype}, expected one of {', '.join(_DTYPE_NAMES)}"
        )
    return TensorSpec(name, _DTYPE_NAMES[stored.dtype], stored.shape)


class SafetensorsWriter:
    """A safetensors file written in any order; it gets its name when it is complete."""

    def __init__(self, path: Path, header: bytes) -> None:
        """`header`: of `make_header`, or an existing file's own, to be reproduced exactly."""
        self.path = path
        self._placed = placed(header, path)
        self.missing = set(self._placed)
        self._whole = ExitStack()
        self._file = self._whole.enter_context(
            self._whole.enter_context(replacing(path)).open("wb", buffering=0)
        )
        self._put(0, memoryview(struct.pack("<Q", len(header)) + header))

    def __contains__(self, name: object) -> bool:
        return name in self._placed

    def add(self, name: str, tensor: Tensor) -> None:
        stored = self._placed[name]
        spec = TensorSpec.of(name, tensor)
        wanted = spec_of(name, stored)
        if spec != wanted:
            raise ValueError(
                f"{name} is {tensor.dtype} {spec.shape}, its place is {torch_dtype(wanted.dtype)} "
                f"{wanted.shape}"
            )
        self._put(stored.start, as_bytes(tensor.cpu()).numpy().data)
        self.missing.discard(name)

    def _put(self, at: int, content: memoryview) -> None:
        """At a place of its own, so that several threads can write at once."""
        while content:
            count = os.pwrite(self._file.fileno(), content[:LARGEST_PIECE], at)
            at = at + count
            content = content[count:]

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with self._whole:
            if error is not None:
                raise error
            if self.missing:
                raise ValueError(
                    f"{self.path} would lack {len(self.missing)} tensors, first {min(self.missing)}"
                )


def make_header(specs: Sequence[TensorSpec]) -> bytes:
    """Entries ordered as the safetensors library orders them: by dtype, then by name."""
    order = list(DTYPES)
    entries: JsonObject = {"__metadata__": {"format": "pt"}}
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


def copy_companions(source: Path, target: Path) -> None:
    """Copy all but weights and their index (config, tokenizer, generation defaults)."""
    target.mkdir(parents=True, exist_ok=True)
    for name in companions(source):
        shutil.copyfile(source / name, target / name)


def write_folder(
    path: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    max_file_bytes: int = FILE_BYTES,
) -> None:
    """Write a small model at once: its tensors, in files of at most that size, and config.json."""
    path.mkdir(parents=True, exist_ok=True)
    files = packed(
        [TensorSpec.of(name, tensor) for name, tensor in tensors.items()], max_file_bytes
    )
    for file, specs in files.items():
        with SafetensorsWriter(path / file, make_header(specs)) as writer:
            for spec in specs:
                writer.add(spec.name, tensors[spec.name])
    if (index := index_of(files)) is not None:
        write_atomic(path / INDEX, json.dumps(index, indent=2) + "\n")
    (path / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")


def packed(
    specs: Iterable[TensorSpec], max_file_bytes: int = FILE_BYTES
) -> dict[str, list[TensorSpec]]:
    """Split tensors, in their order, into files of at most that size; return them by file name."""
    groups: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if groups[-1] and size + spec.nbytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(spec)
        size += spec.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {
        f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups)
    }


def index_of(files: Mapping[str, Sequence[TensorSpec]]) -> JsonObject | None:
    """Index of several safetensors files; None for a single one."""
    if len(files) == 1:
        return None
    return {
        "metadata": {"total_size": sum(spec.nbytes for held in files.values() for spec in held)},
        "weight_map": {spec.name: name for name, held in files.items() for spec in held},
    }
