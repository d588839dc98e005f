"""Rows of Parquet and Arrow files by index, checked at opening, mapped from a temporary copy."""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
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
COPIED = 8 * PIECE  # rows that are copied together


class ColumnRows(Rows):
    def __init__(self, key: str, path: Path) -> None:
        """Check every value: text is UTF-8, dates and decimals can be written as text."""
        self._key = key
        self._path = path
        try:
            self._table = self._mapped()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"{key}: {path} is not a readable {path.suffix[1:]} file ({reason})"
            ) from None
        self._plain = all(_is_plain(column.type) for column in self._table.schema)
        if self._plain:
            with suppress(pa.ArrowInvalid):  # the rows tell which one it is
                self._table.validate(full=True)
                return
        for _ in self:
            pass

    def place(self, index: int) -> str:
        return f"row {index} of {self._path}"

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rows(index, 1)[0]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return chain.from_iterable(
            self._rows(first, min(PIECE, len(self) - first)) for first in range(0, len(self), PIECE)
        )

    def pairs(self, one: str, other: str) -> Iterator[tuple[Any, Any]] | None:
        schema = self._table.schema
        columns = []
        for name in (one, other):
            if name not in schema.names or not types.is_string(schema.field(name).type):
                return None
            chunks = self._table.column(name).chunks
            columns.append(chain.from_iterable(chunk.to_pylist() for chunk in chunks))
        return zip(*columns, strict=True)

    def _rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """Rows as JSON has them: dates and decimals are text, and what is not a number is null."""
        try:
            rows = self._table.slice(first, count).to_pylist()
            if self._plain:
                return rows
            for row in rows:
                for name, value in row.items():
                    if isinstance(value, bytes):  # text stored as bytes
                        with suppress(UnicodeDecodeError):
                            row[name] = value.decode()
            return msgspec.json.decode(msgspec.json.encode(rows, enc_hook=str))
        except (ValueError, TypeError, OverflowError) as error:  # no UTF-8, times that no clock has
            if count == 1:
                raise ConfigError(
                    f"{self._key}: {self.place(first)} is not readable ({error})"
                ) from None
            return [self[index] for index in range(first, first + count)]

    def _mapped(self) -> Any:
        with (
            tempfile.NamedTemporaryFile(prefix="megatron-rl-rows-") as copy,
            _opened(self._path) as (schema, batches),
        ):
            self._check_schema(schema)
            with pa.ipc.new_stream(copy, schema) as writer:
                for batch in batches:
                    writer.write_batch(batch)
            copy.flush()
            return pa.ipc.open_stream(pa.memory_map(copy.name)).read_all()

    def _check_schema(self, schema: Any) -> None:
        for column in schema:
            where = f"{self._key}: {self._path}, column {column.name!r}"
            if schema.names.count(column.name) > 1:
                raise ConfigError(f"{where} is there twice; rename one")
            if _levels(column.type) > DEPTH:
                raise ConfigError(f"{where} is nested deeper than {DEPTH} levels")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Iterable[Any]]]:
    """Schema and batches of a file."""
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as parquet:
            yield parquet.schema_arrow, parquet.iter_batches(COPIED)
        return
    with pa.memory_map(str(path)) as source:
        try:
            table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source).read_all()
        yield table.schema, table.to_batches(COPIED)


def _levels(column: Any) -> int:
    inner = (_levels(column.field(each).type) for each in range(column.num_fields))
    return 1 + max(inner, default=0)


def _is_plain(column: Any) -> bool:
    """True if Python's values of the column are JSON's. Floats are not: they can be NaN."""
    if types.is_struct(column) or types.is_list(column) or types.is_large_list(column):
        return all(_is_plain(column.field(each).type) for each in range(column.num_fields))
    tests = (types.is_string, types.is_large_string, types.is_integer, types.is_boolean)
    return any(test(column) for test in tests)
