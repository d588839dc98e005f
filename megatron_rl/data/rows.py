"""Rows of data files (.jsonl, .parquet, .arrow, a data set's folder) by index, checked at opening.

A row is a JSON object in UTF-8: finite numbers, no nesting deeper than `DEPTH`. Any other is
refused with its place. Rows are not kept in memory, so that files may be of any size.
"""

import bisect
import codecs
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.data import hub_sets
from megatron_rl.data.layouts import DEPTH, SUFFIXES, Rows

_SHARD = re.compile(r"(.+?)(?:-\d{5}-of-\d{5}(?:-\w+)?)?$")


def read_rows(key: str, path: Path) -> Rows:
    """Rows of a file, or of the files of a data set's folder."""
    files = [_one_file(key, each) for each in data_files(key, path)]
    if len(files) == 1:
        return files[0]
    return Joined(files)


def _one_file(key: str, path: Path) -> Rows:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {str(path)!r}; bring it there, or name another file")
    if path.suffix == ".jsonl":
        return JsonLines(key, path)
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"{key}: {path} ends in {path.suffix!r}; {', '.join(SUFFIXES)} are read")
    from megatron_rl.data.columnar import ColumnRows

    return ColumnRows(key, path)


class JsonLines(Rows):
    """Lines of one file, read again where they lie; refused once the file has been written to."""

    def __init__(self, key: str, path: Path) -> None:
        self._key = key
        self._path = path
        self._starts = array("Q")
        self._ends = array("Q")
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ConfigError(f"{key}: {path} cannot be read ({error})") from None
        end = 0
        for number, line in enumerate(self._file, 1):
            start = end
            end += len(line)
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                start = len(codecs.BOM_UTF8)
                line = line[start:]
            if line.strip():
                self._check(line, number)
                self._starts.append(start)
                self._ends.append(end)
        self._seen = self._stamp()

    def _check(self, line: bytes, number: int) -> None:
        where = f"{self._key}: line {number} of {self._path}"
        try:
            row = msgspec.json.decode(line, type=dict)
            if line.count(b"[") + line.count(b"{") > DEPTH and _is_deeper(row, DEPTH):
                raise RecursionError
        except RecursionError:
            raise ConfigError(f"{where} is nested deeper than {DEPTH} levels") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} is not a JSON object in UTF-8 ({error})") from None

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def place(self, index: int) -> str:
        before = os.pread(self._file.fileno(), self._starts[index], 0)
        return f"line {before.count(bytes([10])) + 1} of {self._path}"

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        line = os.pread(self._file.fileno(), self._ends[index] - start, start)
        if self._stamp() != self._seen:
            raise ConfigError(
                f"{self._key}: {self._path} was written to since the run has read it; start again"
            )
        return msgspec.json.decode(line)


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_is_deeper(each, levels - 1) for each in value)


class Joined(Rows):  # of prompts, too
    """Several sequences, one after the other."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files
        self._firsts = [0, *accumulate(map(len, files))]

    def __len__(self) -> int:
        return self._firsts[-1]

    def __iter__(self) -> Iterator[Any]:
        for file in self._files:
            yield from file

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        file, within = self._find(index)
        return self._files[file][within]

    def place(self, index: int) -> str:
        file, within = self._find(index)
        return str(self._files[file].place(within))

    def _find(self, index: int) -> tuple[int, int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = bisect.bisect_right(self._firsts, index) - 1
        return file, index - self._firsts[file]


def data_files(key: str, path: Path) -> list[Path]:
    """The files that `path` stands for; the file itself where it is one. No network."""
    if published := hub_sets.parse(str(path)):
        return published.files(key) or [path]
    if path.is_dir():
        found = _splits(path)
        if len(found) == 1:
            return next(iter(found.values()))
        if not found:
            raise ConfigError(f"{key}: no {', '.join(SUFFIXES)} in the folder {str(path)!r}")
        raise ConfigError(
            f"{key}: {str(path)!r} has the splits {', '.join(sorted(found))}; name one, such as "
            f"{path / min(found)}"
        )
    if path.parent.is_dir() and not path.exists():
        return _splits(path.parent).get(path.name, [path])
    return [path]


def _splits(folder: Path) -> dict[str, list[Path]]:
    """Files by the name of their split: of a clone, or as `save_to_disk` leaves them."""
    if (folder / "dataset_dict.json").is_file():
        inner = folder.glob("*/*")
    else:
        inner = folder.glob("data/*")
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.iterdir(), *inner]):
        shard = _SHARD.match(file.stem)
        if file.suffix not in SUFFIXES or not file.is_file() or shard is None:
            continue
        name = shard[1]
        if file.suffix == ".arrow" and name == "data":
            name = file.parent.name
        if not name.startswith("cache-"):  # results of `map`, which lie beside the rows
            found.setdefault(name, []).append(file)
    return found
