"""Reads the rows of data files (.jsonl, .parquet, .arrow, a data set's folder) by index, and checks
every one.

A row is a JSON object: text that can be encoded, finite numbers, each key once, nothing nested
deeper than `DEPTH`; what is otherwise is refused with its place. All rows are looked at, but none
is kept, so that size is no matter.
"""

import bisect
import codecs
import json
import math
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config import ConfigError
from megatron_rl.data.layouts import DEPTH, Rows
from megatron_rl.files import read_json

SUFFIXES = (".parquet", ".jsonl", ".arrow")
_SHARD = re.compile(r"(.+?)(?:-\d{5}-of-\d{5}(?:-\w+)?)?$")
# whole pairs as well: these lines are looked at once more
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def read_rows(key: str, path: Path) -> Rows:
    """All rows of a file, or of the files of a data set's folder."""
    files = [_one_file(key, each) for each in data_files(key, path)]
    if len(files) == 1:
        return files[0]
    return Joined(files)


def _one_file(key: str, path: Path) -> Rows:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {str(path)!r}; bring it there, or name another file")
    try:
        if path.suffix in (".parquet", ".arrow"):
            from megatron_rl.data.columnar import ColumnRows

            return ColumnRows(key, path)
        if path.suffix == ".jsonl":
            return JsonLines(key, path)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error})") from None
    raise ConfigError(f"{key}: {path} ends in {path.suffix!r}; {', '.join(SUFFIXES)} are read")


class JsonLines(Rows):
    """Lines of one file, read again where they lie; refused once the file has been written to."""

    def __init__(self, key: str, path: Path) -> None:
        self._key = key
        self._path = path
        self._starts = array("Q")
        self._ends = array("Q")
        self._file = path.open("rb")
        end = 0
        for number, line in enumerate(self._file, 1):
            start = end
            end = end + len(line)
            if number == 1 and line.startswith(codecs.BOM_UTF8):
                line = line.removeprefix(codecs.BOM_UTF8)
                start = len(codecs.BOM_UTF8)
            if line.strip():
                self._check(line, number)
                self._starts.append(start)
                self._ends.append(end)
        self._seen = self._stamp()

    def _check(self, line: bytes, number: int) -> None:
        where = f"{self._key}: line {number} of {self._path}"
        try:
            row = _object(line)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{where} is not UTF-8 ({error}); save it as UTF-8") from None
        except RecursionError:
            raise ConfigError(f"{where} is nested deeper than {DEPTH} levels") from None
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{where} holds {type(row).__name__}, expected an object")

    def _stamp(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def place(self, index: int) -> str:
        return f"line {os.pread(self._file.fileno(), self._starts[index], 0).count(bytes([10])) + 1} of {self._path}"

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        start = self._starts[index]
        end = self._ends[index]
        line = os.pread(self._file.fileno(), end - start, start)
        if self._stamp() != self._seen:
            raise ConfigError(
                f"{self._key}: {self._path} was written to since the run has read it; start again"
            )
        try:
            return msgspec.json.decode(line)
        except msgspec.DecodeError:  # a number beyond 64 bits, which Python has
            return json.loads(line)


class Joined(Rows):  # of prompts, too
    """Several sequences, one after the other."""

    def __init__(self, files: Sequence[Any]) -> None:
        self._files = files
        self._ends = array("Q")
        for file in files:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(file))

    def __len__(self) -> int:
        return self._ends[-1]

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
        file = bisect.bisect_right(self._ends, index)
        return file, index - (self._ends[file - 1] if file else 0)


def _object(line: bytes) -> Any:
    row = json.loads(
        line.decode(),
        object_pairs_hook=_each_once,
        parse_constant=_finite,
        parse_float=_finite,
        parse_int=_finite,
    )
    if _HALF_A_PAIR.search(line) or line.count(b"[") + line.count(b"{") > DEPTH:
        _look_inside(row)
    return row


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in keys if keys.count(name) > 1)!r} is there twice"
        )
    return found


def _finite(text: str) -> int | float:
    if text.endswith(("NaN", "Infinity")):
        raise ValueError(f"{text} is not a number of JSON")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}... is too large")
    if text.lstrip("-").isdigit():
        return int(text)
    return value


def _look_inside(value: Any, depth: int = 0) -> None:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"{half!a} is half of a surrogate pair, and no character") from None
    elif isinstance(value, (dict, list)):
        if depth == DEPTH:
            raise RecursionError
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            _look_inside(each, depth + 1)


def data_files(key: str, path: Path) -> list[Path]:
    """The files that `path` stands for; the file itself where it is one."""
    if path.is_dir():
        found = _splits(key, path)
        if len(found) == 1:
            return next(iter(found.values()))
        if not found:
            raise ConfigError(f"{key}: no {', '.join(SUFFIXES)} in the folder {str(path)!r}")
        raise ConfigError(
            f"{key}: {str(path)!r} has the splits {', '.join(sorted(found))}; name one, such as "
            f"{path / min(found)}"
        )
    if (
        path.parent.is_dir()
        and not path.exists()
        and path.name in (found := _splits(key, path.parent))
    ):
        return found[path.name]
    return [path]


def _splits(key: str, folder: Path) -> dict[str, list[Path]]:
    if (folder / "state.json").is_file():  # one split, as save_to_disk writes it
        try:
            names = [each["filename"] for each in read_json(folder / "state.json")["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{key}: {folder / 'state.json'} is not readable ({error})") from None
        if names:
            return {folder.name: [folder / Path(name).name for name in names]}
        return {}
    if (folder / "dataset_dict.json").is_file():
        inner = sorted(each for each in folder.iterdir() if (each / "state.json").is_file())
        return {name: files for each in inner for name, files in _splits(key, each).items()}
    found: dict[str, list[Path]] = {}
    for file in sorted([*folder.iterdir(), *(folder / "data").glob("*")]):
        if file.suffix in SUFFIXES and file.is_file():
            shard = _SHARD.match(file.stem)
            assert shard is not None
            found.setdefault(shard[1], []).append(file)
    return found
