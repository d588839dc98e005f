"""Rows of Parquet and Arrow files by index, checked at opening; of a temporary copy if Arrow or in
large row groups.
"""

import bisect
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
from pyarrow import types

from megatron_rl.config import ConfigError
from megatron_rl.data.layouts import DEPTH, Rows

PIECE = 1024  # rows that are decoded together
LARGEST_PIECE = 8 * PIECE


class ColumnRows(Rows):
    def __init__(self, key: str, path: Path) -> None:
        """Looks at every value: text is UTF-8, and what has no plain form (dates, decimals) can be
        shown.
        """
        self._key = key
        self._path = path
        self._length = 0
        try:
            self._file = pq.ParquetFile(_copied(key, path) or path)
            _check_schema(key, path, self._file.schema_arrow)
            self._plain = all(_is_plain(column.type) for column in self._file.schema_arrow)
            for piece in self._file.iter_batches(PIECE):
                self._check(piece, self._length)
                self._length += piece.num_rows
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            said = " ".join(str(error).split())
            raise ConfigError(
                f"{key}: {path} is not a readable {path.suffix[1:]} file ({said})"
            ) from None
        sizes = [
            self._file.metadata.row_group(each).num_rows
            for each in range(self._file.num_row_groups)
        ]
        self._starts = [0, *accumulate(sizes[:-1])]
        self._group = lru_cache(8)(self._file.read_row_group)

    def place(self, index: int) -> str:
        return f"row {index} of {self._path}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self._length:
            raise IndexError(index)
        group = bisect.bisect_right(self._starts, index) - 1
        piece = self._group(group).slice(index - self._starts[group], 1)
        return self._rows(piece, index)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        first = 0
        for piece in self._file.iter_batches(PIECE):
            yield from self._rows(piece, first)
            first += piece.num_rows

    def pairs(self, one: str, other: str) -> Iterator[tuple[Any, Any]] | None:
        schema = self._file.schema_arrow
        if not all(
            name in schema.names and types.is_string(schema.field(name).type)
            for name in (one, other)
        ):
            return None
        pieces = self._file.iter_batches(PIECE, columns=[one, other])
        columns = ((piece.column(name).to_pylist() for name in (one, other)) for piece in pieces)
        return chain.from_iterable(zip(*both, strict=True) for both in columns)

    def _check(self, piece: Any, first: int) -> None:
        if self._plain:
            try:
                return piece.validate(full=True)
            except pa.ArrowInvalid:
                pass  # the rows below say which one
        self._rows(piece, first)

    def _rows(self, piece: Any, first: int) -> list[dict[str, Any]]:
        """Rows as JSON has them: dates and decimals are text, and what is not a number is null."""
        try:
            rows = piece.to_pylist()
            for row in [] if self._plain else rows:  # text that its writer has stored as bytes
                found = {
                    name: one.decode(errors="ignore")
                    for name, one in row.items()
                    if isinstance(one, bytes)
                }
                row |= {name: text for name, text in found.items() if text.encode() == row[name]}
            if self._plain:
                return rows
            return msgspec.json.decode(msgspec.json.encode(rows, enc_hook=str))
        except (
            ValueError,
            TypeError,
            OverflowError,
        ) as error:  # text that is not UTF-8, times that no clock shows
            if piece.num_rows == 1:
                raise ConfigError(
                    f"{self._key}: {self.place(first)} is not readable ({error})"
                ) from None
            return [
                self._rows(piece.slice(each, 1), first + each)[0] for each in range(piece.num_rows)
            ]


def _copied(key: str, path: Path) -> Any:
    """A Parquet copy in small pieces of a file that is Arrow or has large ones; gone when nobody
    reads it any more.
    """
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as source:
            groups = (
                source.metadata.row_group(each).num_rows for each in range(source.num_row_groups)
            )
            if max(groups, default=0) <= LARGEST_PIECE:
                return None
            return _in_pieces(key, path, source.schema_arrow, source.iter_batches(PIECE))
    with pa.memory_map(str(path)) as mapped:
        try:
            stream = pa.ipc.open_stream(mapped)
        except pa.ArrowInvalid:
            file = pa.ipc.open_file(mapped)
            return _in_pieces(
                key, path, file.schema, map(file.get_batch, range(file.num_record_batches))
            )
        return _in_pieces(key, path, stream.schema, stream)


def _in_pieces(key: str, path: Path, schema: Any, batches: Any) -> Any:
    _check_schema(key, path, schema)
    copy = tempfile.TemporaryFile(prefix="megatron-rl-rows-")  # noqa: SIM115 (it lives as long as its rows)
    with pq.ParquetWriter(pa.PythonFile(copy, mode="w"), schema, compression="lz4") as writer:
        for batch in batches:
            writer.write_batch(batch, row_group_size=PIECE)
    copy.seek(0)
    return pa.PythonFile(copy, mode="r")


def _check_schema(key: str, path: Path, schema: Any) -> None:
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise ConfigError(f"{key}: {path} has the column {twice[0]!r} twice; rename one")
    for column in schema:
        if _levels(column.type) > DEPTH:
            raise ConfigError(
                f"{key}: {path}, column {column.name!r} is nested deeper than {DEPTH} levels"
            )


def _levels(column: Any) -> int:
    return 1 + max(
        (_levels(column.field(each).type) for each in range(column.num_fields)), default=0
    )


def _is_plain(column: Any) -> bool:
    """Whether Python's form of it is JSON's. A float can be NaN, which is none."""
    if types.is_struct(column) or types.is_list(column) or types.is_large_list(column):
        return all(_is_plain(column.field(each).type) for each in range(column.num_fields))
    return any(
        test(column)
        for test in (types.is_string, types.is_large_string, types.is_integer, types.is_boolean)
    )
