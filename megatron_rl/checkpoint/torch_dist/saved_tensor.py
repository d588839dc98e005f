"""One tensor that torch.save has written, read without unpickling it.

It is a zip archive: `data.pkl` says how the numbers lie, `data/0` holds them as they are.
"""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_rl.checkpoint.torch_dist.pickled import DAMAGED, Made, is_plain, read_saved_head
from megatron_rl.models.tensors import DTYPES, empty_tensor, torch_dtype

_REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool", "Untyped")
_NAMES = {*_REBUILD, "collections.OrderedDict", *(f"torch.{kind}Storage" for kind in _STORAGES)} | {
    "torch.storage.UntypedStorage",
    *(f"torch.{dtype}" for dtype in DTYPES),
}
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a zip's member: the lengths of its name and of what follows it


def read_saved(path: Path, begin: int, nbytes: int, dtype: str, size: tuple[int, ...]) -> torch.Tensor:
    """ValueError where those bytes of the file do not hold such a tensor."""
    with path.open("rb") as file:
        window = _Window(file, begin, nbytes)
        try:
            with zipfile.ZipFile(window) as archive:
                members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                storage, start, shape, stride = _layout(read_saved_head(archive, _NAMES))
                data = members[f"data/{storage}"]
            if not is_plain(data, nbytes) or shape != size:
                raise ValueError(f"it holds another tensor than one of {list(size)}")
            window.seek(data.header_offset)
            window.seek(sum(_LOCAL_HEADER.unpack(window.read(_LOCAL_HEADER.size))), io.SEEK_CUR)
            values = empty_tensor((data.file_size,), torch.uint8)
            if window.readinto(values.numpy()) != data.file_size:
                raise ValueError("it is cut off")
            return torch.as_strided(values.view(torch_dtype(dtype)), size, stride, start)
        except DAMAGED as error:
            raise ValueError(f"it is damaged ({type(error).__name__})") from None


def _layout(head: Any) -> tuple[str, int, tuple[int, ...], tuple[int, ...]]:
    """The storage's name; the first element, shape and strides."""
    if not isinstance(head, Made) or head.name not in _REBUILD or len(head.arguments) < 4:
        raise ValueError("it holds no tensor")
    storage, start, shape, stride = head.arguments[:4]
    named = storage.arguments[0] if isinstance(storage, Made) and len(storage.arguments) == 1 else ()
    numbers = (start, *shape, *stride) if isinstance(shape, tuple) and isinstance(stride, tuple) else (None,)
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("it says nothing of its shape")
    if not isinstance(named, tuple) or len(named) < 3 or not isinstance(named[2], str):
        raise ValueError("it names no storage")
    return named[2], start, shape, stride


class _Window(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, begin: int, nbytes: int) -> None:
        self._file, self._begin, self._nbytes, self._at = file, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("it is damaged: a place before its beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        view = memoryview(target)[: max(0, self._nbytes - self._at)]
        self._file.seek(self._begin + self._at)
        count = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += count
        return count
