"""Rows of a file, and what everyone may rely on in them.

A row is a JSON object: text that can be encoded, finite numbers, each key once, nothing nested deeper than `DEPTH`.
So rewards, tokenizer and records meet no row that they cannot take; what is otherwise is refused with its place.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config import ConfigError

DEPTH = 64
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")  # whole pairs as well: these lines are looked at once more
_BATCH = 1024


def read_rows(key: str, path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError(f"{key}: no file {str(path)!r}; `megatron-rl toy` makes the toy's data, or name your own")
    try:
        if path.suffix == ".parquet":
            return _parquet(key, path)
        if path.suffix == ".jsonl":
            return _json_lines(key, path)
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read ({error})") from None
    raise ConfigError(f"{key}: {path} ends in {path.suffix!r}; .jsonl and .parquet are read")


def field(row: Mapping[str, Any], name: str) -> Any:
    """The column `name`, or, where there are dots in it, a value inside a column. LookupError says what is there."""
    if name in row:
        return row[name]
    found: Any = row
    passed: list[str] = []
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            there = ", ".join(map(str, found)) or "nothing" if isinstance(found, Mapping) else type(found).__name__
            raise LookupError(f"{'.'.join(passed)} has {there}" if passed else f"it has {there}")
        found = found[part]
        passed.append(part)
    return found


def _json_lines(key: str, path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            try:
                row = _object(line)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{key}: {path}, line {number} is not UTF-8 ({error}); save it as UTF-8") from None
            except RecursionError:
                raise ConfigError(f"{key}: {path}, line {number} is nested deeper than {DEPTH} levels") from None
            except ValueError as error:
                raise ConfigError(f"{key}: {path}, line {number} is not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ConfigError(f"{key}: {path}, line {number} holds {type(row).__name__}, expected an object")
            rows.append(row)
    return rows


def _object(line: bytes) -> Any:
    row = json.loads(
        line.decode(), object_pairs_hook=_each_once, parse_constant=_no_number, parse_float=_finite, parse_int=_finite
    )
    if _HALF_A_PAIR.search(line) or line.count(b"[") + line.count(b"{") > DEPTH:
        _look_inside(row)
    return row


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in keys if keys.count(name) > 1)!r} is there twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number of JSON")


def _finite(text: str) -> int | float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]}... is too large")
    return int(text) if text.lstrip("-").isdigit() else value


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


def _parquet(key: str, path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    rows: list[dict[str, Any]] = []
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
            if twice:
                raise ConfigError(f"{key}: {path} has the column {twice[0]!r} twice; rename one")
            for column in schema:
                if _levels(column.type) > DEPTH:
                    raise ConfigError(f"{key}: {path}, column {column.name!r} is nested deeper than {DEPTH} levels")
            for batch in file.iter_batches(_BATCH):
                rows += _plain_rows(batch, key, path, len(rows))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key}: {path} is not a readable parquet file ({error})") from None
    return rows


def _levels(column: Any) -> int:
    return 1 + max((_levels(column.field(each).type) for each in range(column.num_fields)), default=0)


def _plain_rows(batch: Any, key: str, path: Path, first: int) -> list[dict[str, Any]]:
    """As JSON has them: dates and decimals are text, and what is not a number is null."""
    try:
        return msgspec.json.decode(msgspec.json.encode(batch.to_pylist(), enc_hook=str))
    except (ValueError, TypeError, OverflowError) as error:  # text that is not UTF-8, times that no clock shows
        if batch.num_rows == 1:
            raise ConfigError(f"{key}: row {first} of {path} is not readable ({error})") from None
        single = (_plain_rows(batch.slice(each, 1), key, path, first + each) for each in range(batch.num_rows))
        return [row for rows in single for row in rows]
